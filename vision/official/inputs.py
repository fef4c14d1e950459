"""The images that the official variants of methods look at, as functions of the data set and the phase."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from omegaconf import DictConfig
from torch import Tensor

from fire_core.state import State
from vision.images import Images
from vision.protocols import PhaseData, batch_indices, make_batch


def show_images(state: State, cfg: DictConfig, images: Images, phases: list[PhaseData]) -> None:
    """Let the official variants of methods look at images of the present phase of a run.

    state.extras["test_inputs"](count) returns the inputs of the last `count` test samples, and
    state.extras["last_inputs"](count) yields the last batches of inputs of the phase before, in order, with at least
    `count` samples if the phase has as many.
    """

    def test_inputs(count: int) -> Tensor:
        last = torch.arange(len(images.test_labels), device=images.test_labels.device)[-count:]
        return make_batch(images, phases[state.phase], last, test=True)[0]

    def last_inputs(count: int) -> Iterator[Tensor]:
        phase = phases[state.phase - 1]
        where = phase.index, phase.epochs - 1, len(phase.indices), cfg.batch_size, phase.indices.device
        for batch in batch_indices(cfg.seed, *where)[-(count // cfg.batch_size + 2) :]:
            yield make_batch(images, phase, phase.indices[batch])[0]

    state.extras |= {"test_inputs": test_inputs, "last_inputs": last_inputs}
