"""The images that the official variants of methods look at, as functions of the data set and the phase."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vision.images import Images
from vision.official.state import ImageState
from vision.protocols import PhaseData, batch_indices, make_batch


def show_images(
    state: ImageState, images: Images, phases: list[PhaseData], index: int, *, seed: int, batch_size: int
) -> None:
    """Set `test_inputs` and `last_inputs` of a state for phase `index` of a run with this seed and batch size."""
    before = phases[index - 1]
    everything = torch.arange(len(images.test_labels), device=images.test_labels.device)
    state.test_inputs = lambda count: make_batch(images, phases[index], everything[-count:], test=True)[0]
    state.last_inputs = lambda count: last_inputs(images, before, count, seed=seed, batch_size=batch_size)


def last_inputs(
    images: Images, phase: PhaseData, count: int, *, seed: int, batch_size: int
) -> Iterator[Tensor]:
    """Yield the inputs of the last batches of a phase, `count` images or more."""
    device, last_epoch = phase.indices.device, phase.epochs - 1
    batches = batch_indices(seed, phase.index, last_epoch, len(phase.indices), batch_size, device)
    for batch in batches[-(count // batch_size + 2) :]:
        yield make_batch(images, phase, phase.indices[batch])[0]
