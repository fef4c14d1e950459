"""The images that the official variants of methods look at, as functions of the data set and the phase."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fire_core.state import State
from vision.images import Images
from vision.protocols import PhaseData, batch_indices, make_batch


def show_images(state: State, images: Images, phases: list[PhaseData], *, seed: int, batch_size: int) -> None:
    """Let the official variants of methods look at images of the present phase of a run with this seed and batch size.

    state.extras["test_inputs"](count) returns the inputs of the last `count` test samples, and
    state.extras["last_inputs"](count) the last batches of inputs of the phase before, in order, with at least `count`
    samples if the phase has as many.
    """
    everything = torch.arange(len(images.test_labels), device=images.test_labels.device)
    state.extras["test_inputs"] = lambda count: make_batch(
        images, phases[state.phase], everything[-count:], test=True
    )[0]
    state.extras["last_inputs"] = lambda count: last_inputs(
        images, phases[state.phase - 1], count, seed=seed, batch_size=batch_size
    )


def last_inputs(
    images: Images, phase: PhaseData, count: int, *, seed: int, batch_size: int
) -> Iterator[Tensor]:
    """Yield the inputs of the last batches of a phase, `count` images or more."""
    device, last_epoch = phase.indices.device, phase.epochs - 1
    batches = batch_indices(seed, phase.index, last_epoch, len(phase.indices), batch_size, device)
    for batch in batches[-(count // batch_size + 2) :]:
        yield make_batch(images, phase, phase.indices[batch])[0]
