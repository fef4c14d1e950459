"""The data of a run, phase after phase: batches, what is measured on, and the learning rate of each epoch.

Every batch is a pure function of the seed and its place in the run.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor
from torch.optim import Optimizer

from harness.device import send
from harness.runs.seeding import generator
from harness.trial import part_of, seed_of
from vision.data import load
from vision.images import Images
from vision.official import switches
from vision.protocols import PhaseData, make_phases


class Curriculum:
    """The images of a run. Called, it yields the data of the present phase once, for methods that look at coming data.

    at: where the run stands (`Session.at`). schedule: (phase, epoch from 0 on, whether it is the last one of the phase or
    the run, whether a test follows) of each epoch of the run.
    """

    def __init__(self, cfg: DictConfig, device: torch.device, at: dict[str, Any]) -> None:
        images = load(**cfg.data, root=cfg.run.data_root, device=device)
        self.images = switches.with_statistics(images) if cfg.normalisation == "official" else images
        self.phases = make_phases(**cfg.protocol, images=self.images, seed=cfg.seed, splits=cfg.splits)
        self.cfg, self.at = cfg, at
        epochs = [(phase, epoch) for phase in self.phases for epoch in range(phase.epochs)]
        first, self.schedule = self.phases[0].epochs, []
        count = first + part_of(cfg, len(epochs) - first)
        for number, (phase, epoch) in enumerate(epochs[:count], 1):
            last = epoch + 1 == phase.epochs or number == count
            tested = last or (epoch + 1) % phase.own(cfg.eval_every) == 0
            self.schedule.append((phase, epoch, last, tested))

    def __str__(self) -> str:
        return f"{self.images}; {len(self.schedule)} epochs"

    @property
    def phase(self) -> PhaseData:
        """The phase in which the run stands."""
        return self.phases[self.at["phase"]]

    def batches(self, phase: PhaseData, epoch: int, start: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the normalised images and the labels of an epoch of training, from batch `start` on."""
        batches = self._indices(phase, epoch, seed_of(self.cfg, phase.index))
        for number, batch in enumerate(batches[start:], start):
            done = (epoch + number / len(batches)) / phase.epochs
            indices, labels = pick(self.phases, phase, batch, done, self.cfg.gradual or 0.0)
            yield make_inputs(self.images, phase, indices), labels

    def __call__(self) -> Iterator[tuple[Tensor, Tensor]]:
        phase = self.phase
        for batch in self._indices(phase, -1, seed_of(self.cfg, phase.index)):
            yield make_inputs(self.images, phase, phase.indices[batch]), phase.labels[batch]

    def probe(self) -> tuple[Tensor, Tensor]:
        """Return the first images of the phase and their labels, on which plasticity is measured."""
        phase, count = self.phase, self.cfg.metrics_samples
        return make_inputs(self.images, phase, phase.indices[:count]), phase.labels[:count]

    def test_inputs(self, count: int) -> Tensor:
        """Return the last `count` test images, for official variants of methods."""
        return make_inputs(self.images, self.phase, slice(-count, None), test=True)

    def last_inputs(self, count: int) -> Iterator[Tensor]:
        """Yield the last batches of images of the phase before, `count` images or more, for official variants of methods."""
        phase, batches = self.phases[self.at["phase"] - 1], count // self.cfg.batch_size + 2
        for batch in self._indices(phase, phase.epochs - 1, seed_of(self.cfg, phase.index))[-batches:]:
            yield make_inputs(self.images, phase, phase.indices[batch])

    def _indices(self, phase: PhaseData, epoch: int, seed: int) -> tuple[Tensor, ...]:
        return batch_indices(seed, phase.index, epoch, len(phase), self.cfg.batch_size, phase.indices.device)


def make_inputs(images: Images, phase: PhaseData, indices: Tensor | slice, *, test: bool = False) -> Tensor:
    """Return normalised float32 images (n, channels, height, width), pixels in the phase's order.

    indices: (n,) into the training set, or with `test` into the test set.
    """
    pictures = (images.test_images if test else images.train_images)[indices]
    if phase.permutation is not None:
        pictures = pictures.flatten(2)[..., phase.permutation].view_as(pictures)
    return images.normalise(pictures, test=test)


def pick(
    phases: Sequence[PhaseData], phase: PhaseData, batch: Tensor, done: float, gradual: float
) -> tuple[Tensor, Tensor]:
    """Return the training images and labels at the positions `batch` (n,) of a phase, both (n,).

    In the first share `gradual` of each phase but the first, images of the phase before take the place of some: of all at
    its start, and of fewer and fewer until its end. done: share of the phase that is over.
    """
    indices, labels = phase.indices[batch], phase.labels[batch]
    if phase.index == 0 or done >= gradual:
        return indices, labels
    before, new = phases[phase.index - 1], round(len(batch) * done / gradual)
    places = batch[new:] % len(before.indices)
    indices = torch.cat([indices[:new], before.indices[places]])
    return indices, torch.cat([labels[:new], before.labels[places]])


def batch_indices(
    seed: int, phase: int, epoch: int, count: int, batch_size: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Return the shuffled batches of one epoch on `device`: int64 positions in [0, count), each in exactly one batch.

    The last batch may be smaller; a single left-over image joins the batch before it, because batch norm needs two.
    """
    order = send(torch.randperm(count, generator=generator(seed, "batches", phase, epoch)), device)
    batches = order.split(batch_size)
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches = (*batches[:-2], torch.cat(batches[-2:]))
    return batches


def set_learning_rate(optimizer: Optimizer, cfg: DictConfig, phase: PhaseData, epoch: int) -> None:
    """Set the rate of an epoch: a linear rise over `warmup_share` of the phase, then constant; or the official one."""
    factor = min(1.0, (epoch + 1) / max(1, round(phase.own(cfg.warmup_share) * phase.epochs)))
    if cfg.schedule == "official":
        factor = switches.rate_factor(epoch, phase.epochs)
    for group in optimizer.param_groups:
        group["lr"] = cfg.learning_rate * factor * group.get("rate_factor", 1.0)
