"""Protocols: the data of each phase, as pure functions of the data set, the run's seed and the protocol's settings.

`warm_start`, `continual` and `class_incremental` are the paper's (Figure 2a, b, c). `random_label`, `label_noise` and
`permuted` are probes from the literature that show a loss of plasticity in minutes. No loader has state: a resumed run
calls the same functions again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, ListConfig
from torch import Tensor

from fire_core.errors import UserError
from harness.runs.seeding import generator, numpy_generator
from harness.transfer import send
from harness.trial import part_of, seed_of
from vision.images import Images
from vision.official import switches


@dataclass(frozen=True)
class PhaseData:
    """The data of one phase, with all tensors on the data set's device.

    indices: (n,) int64 into the training set. labels: (n,) int64 in the same order, true ones or the probe's.
    epochs: length of the phase. seen: sorted classes trained on so far, None if the protocol adds no classes.
    new: those of `seen` that this phase adds, None unless `replay` was given.
    permutation: (height * width,) int64 order of the pixels, None for the usual one.
    """

    index: int
    name: str
    indices: Tensor
    labels: Tensor
    epochs: int
    seen: Tensor | None = None
    new: Tensor | None = None
    permutation: Tensor | None = None

    def own(self, setting: float | ListConfig) -> float:
        """Return the value of a setting, which may have one for each phase."""
        return setting[self.index] if isinstance(setting, ListConfig) else setting

    def to(self, device: torch.device) -> PhaseData:
        """Return the phase with all tensors on `device`."""
        return PhaseData(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(self).values()))


def make_batch(
    images: Images, phase: PhaseData, indices: Tensor, labels: Tensor | None = None, *, test: bool = False
) -> tuple[Tensor, Tensor]:
    """Return normalised float32 images (n, channels, height, width), pixels in the phase's order, and their labels.

    indices: (n,) into the training set, or with `test` into the test set. labels: (n,); None takes the data set's own.
    """
    pictures = (images.test_images if test else images.train_images)[indices]
    if labels is None:
        labels = (images.test_labels if test else images.train_labels)[indices]
    if phase.permutation is not None:
        pictures = pictures.flatten(2)[..., phase.permutation].view_as(pictures)
    return images.normalise(pictures, test=test), labels


def training_batches(
    cfg: DictConfig, images: Images, phases: Sequence[PhaseData], phase: PhaseData, epoch: int, start: int = 0
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the batches of one epoch of training, from number `start` on: normalised images and labels."""
    seed, count = seed_of(cfg, phase.index), len(phase.indices)
    batches = batch_indices(seed, phase.index, epoch, count, cfg.batch_size, phase.indices.device)
    for number, batch in enumerate(batches[start:], start):
        done = (epoch + number / len(batches)) / phase.epochs
        yield make_batch(images, phase, *pick(phases, phase, batch, done, cfg.gradual or 0.0))


def coming_batches(cfg: DictConfig, images: Images, phase: PhaseData) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the phase's training set once, in batches, for methods that use the coming data."""
    count = len(phase.indices)
    for batch in batch_indices(cfg.seed, phase.index, -1, count, cfg.batch_size, phase.indices.device):
        yield make_batch(images, phase, phase.indices[batch], phase.labels[batch])


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
    return (
        torch.cat([indices[:new], before.indices[places]]),
        torch.cat([labels[:new], before.labels[places]]),
    )


def batch_indices(
    seed: int, phase: int, epoch: int, count: int, batch_size: int, device: torch.device | str = "cpu"
) -> tuple[Tensor, ...]:
    """Return the shuffled batches of one epoch on `device`: int64 positions in [0, count).

    Each position is in exactly one batch, and the arguments alone determine the batches. The last batch may be smaller;
    a single left-over image joins the batch before it, because batch norm needs two images.
    """
    order = send(torch.randperm(count, generator=generator(seed, "batches", phase, epoch)), device)
    batches = order.split(batch_size)
    if len(batches) > 1 and len(batches[-1]) == 1:
        batches = (*batches[:-2], torch.cat(batches[-2:]))
    return batches


def make_phases(
    name: str, images: Images, seed: int, *, splits: str = "ours", **settings: Any
) -> list[PhaseData]:
    """Return all phases of protocol `name`, in order. Settings are those of the function of that name in this file.

    splits: "official" draws the paper's protocols as the authors' code does, so that a seed selects the same images.
    Raises UserError for a setting that the protocol does not have, and for settings that do not fit the data set.
    """
    build = PROTOCOLS[name]
    known = list(inspect.signature(build).parameters)[2:]
    if surplus := settings.keys() - set(known):
        raise UserError(f"protocol {name} has no setting {min(surplus)!r}: it has {', '.join(known)}")
    if "splits" in known:
        settings["splits"] = splits
    return [phase.to(images.train_labels.device) for phase in build(images, seed, **settings)]


def phase_count(name: str, **settings: Any) -> int:
    """Return the number of phases of protocol `name`."""
    known = inspect.signature(PROTOCOLS[name]).parameters
    counts = [settings.get(key, known[key].default) for key in ("stages", "tasks") if key in known]
    return counts[0] if counts else 2


def schedule_of(cfg: DictConfig, phases: Sequence[PhaseData]) -> list[tuple[PhaseData, int]]:
    """Return the epochs of a run in order, as (phase, epoch from 0 on); of a trial, those of its share."""
    schedule = [(phase, epoch) for phase in phases for epoch in range(phase.epochs)]
    first = phases[0].epochs
    return schedule[: first + part_of(cfg, len(schedule) - first)]


def warm_start(
    images: Images,
    seed: int,
    *,
    share: float = 0.1,
    epochs: int | Sequence[int] = (1000, 100),
    splits: str = "ours",
) -> list[PhaseData]:
    """Return two phases: a random `share` of the training set, then all of it (paper, Figure 2a)."""
    order = _image_order(images, seed, "warm_start", splits)
    return _growing_shares(images, order, [share, 1.0], epochs)


def continual(
    images: Images,
    seed: int,
    *,
    stages: int = 10,
    epochs: int | Sequence[int] = 100,
    replay: float | None = None,
    splits: str = "ours",
) -> list[PhaseData]:
    """Return `stages` phases: 1/stages of the training set, then 2/stages, ... and all of it (paper, Figure 2b).

    replay: later phases keep only this share of the images that a phase added, always the same ones; None keeps all.
    """
    order = _image_order(images, seed, "continual", splits)
    return _growing_shares(images, order, [(stage + 1) / stages for stage in range(stages)], epochs, replay)


def class_incremental(
    images: Images,
    seed: int,
    *,
    stages: int = 20,
    epochs: int | Sequence[int] = 100,
    replay: float | None = None,
    splits: str = "ours",
) -> list[PhaseData]:
    """Return `stages` phases that each add the same number of classes to those before (paper, Figure 2c).

    The seed gives the order of the classes. If `stages` does not divide their number, the first phases add one more.
    replay: later phases keep only this share of the images of each class, always the same ones; None keeps all.
    """
    if stages > images.classes:
        raise UserError(
            f"protocol.stages={stages} is more than the {images.classes} classes of {images.name}"
        )
    if splits == "official":
        order = switches.orders(images, seed)[1]
    else:
        order = numpy_generator(seed, "class_incremental").permutation(images.classes)
    lengths = _epochs(epochs, stages)
    labels = images.train_labels.cpu()
    result, seen = [], np.array([], dtype=np.int64)
    stays = torch.zeros(len(labels), dtype=torch.bool)
    for index, new in enumerate(np.array_split(order, stages)):
        seen = np.sort(np.concatenate([seen, new]))
        chosen = torch.isin(labels, torch.from_numpy(seen)).nonzero().flatten()
        # data sets may be sorted by class, and plasticity is measured on the first images
        mixed = torch.randperm(len(chosen), generator=generator(seed, "class_incremental", index))
        chosen = chosen[mixed]
        classes = {"seen": torch.from_numpy(seen)}
        if replay is not None:
            classes["new"] = torch.from_numpy(np.sort(new))
            chosen = chosen[torch.isin(labels[chosen], classes["new"]) | stays[chosen]]
            for label in new.tolist():
                of_class = chosen[labels[chosen] == label]
                stays[of_class[: round(replay * len(of_class))]] = True
        result.append(
            PhaseData(index, f"{len(seen)} classes", chosen, labels[chosen], lengths[index], **classes)
        )
    return result


def random_label(
    images: Images, seed: int, *, tasks: int = 20, count: int = 1000, epochs: int | Sequence[int] = 30
) -> list[PhaseData]:
    """Return `tasks` phases, each with `count` new images and random labels to memorise; train accuracy is measured.

    Lyle et al. 2023, Kumar et al. 2023. Images are taken from one shuffle of the training set after another. If fewer
    than `count` are left of a shuffle, they are not used.
    """
    result = []
    for index, length in enumerate(_epochs(epochs, tasks)):
        chosen = _fresh(images, seed, "random_label", index, count)
        labels = _random_labels(images, seed, "random_label", index, count)
        result.append(PhaseData(index, f"task {index + 1}", chosen, labels, length))
    return result


def label_noise(
    images: Images, seed: int, *, noisy: int = 3000, clean: int = 5000, epochs: int | Sequence[int] = (30, 30)
) -> list[PhaseData]:
    """Return two phases: random labels of `noisy` images (train accuracy), then true ones of `clean` (test accuracy).

    Both take the first images of the same shuffle, so the smaller set is part of the larger one.
    """
    first, second = (_fresh(images, seed, "label_noise", 0, count) for count in (noisy, clean))
    labels = _random_labels(images, seed, "label_noise", 0, noisy)
    lengths = _epochs(epochs, 2)
    return [
        PhaseData(0, "random labels", first, labels, lengths[0]),
        PhaseData(1, "true labels", second, images.train_labels.cpu()[second], lengths[1]),
    ]


def permuted(
    images: Images, seed: int, *, tasks: int = 10, count: int | None = None, epochs: int | Sequence[int] = 10
) -> list[PhaseData]:
    """Return `tasks` phases, each with a new order of the pixels of all images; test accuracy is measured.

    Each phase has `count` images, chosen as in `random_label`; None takes the whole training set.
    """
    labels = images.train_labels.cpu()
    result = []
    for index, length in enumerate(_epochs(epochs, tasks)):
        chosen = _fresh(images, seed, "permuted", index, len(labels) if count is None else count)
        order = torch.randperm(images.image_size**2, generator=generator(seed, "pixels", index))
        name = f"order {index + 1}"
        result.append(PhaseData(index, name, chosen, labels[chosen], length, permutation=order))
    return result


PROTOCOLS: dict[str, Callable[..., list[PhaseData]]] = {
    build.__name__: build
    for build in (warm_start, continual, class_incremental, random_label, label_noise, permuted)
}


def _growing_shares(
    images: Images,
    order: Tensor,
    shares: list[float],
    epochs: int | Sequence[int],
    replay: float | None = None,
) -> list[PhaseData]:
    """Return one phase for each of the rising `shares` of the images, which are taken in the given order."""
    labels, result = images.train_labels.cpu(), []
    stays, end = order[:0], 0
    for index, (share, length) in enumerate(zip(shares, _epochs(epochs, len(shares)), strict=True)):
        start, end = end, max(1, round(share * len(order)))
        chosen = torch.cat([stays, order[start:end]])
        kept = (end - start) if replay is None else round(replay * (end - start))
        stays = torch.cat([stays, order[start : start + kept]])
        result.append(PhaseData(index, f"{share:.0%} of the data", chosen, labels[chosen], length))
    return result


def _image_order(images: Images, seed: int, purpose: str, splits: str) -> Tensor:
    """Return the order in which a protocol takes the training images, (n,) int64."""
    if splits == "official":
        return torch.from_numpy(switches.orders(images, seed)[0])
    return _shuffle(images, seed, purpose, 0)


def _shuffle(images: Images, seed: int, purpose: str, round_number: int) -> Tensor:
    order = numpy_generator(seed, purpose, round_number).permutation(len(images.train_labels))
    return torch.from_numpy(order.astype(np.int64))


def _fresh(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    """Return block `index` of `count` images from an endless sequence of shuffles. No image occurs twice in a block."""
    total = len(images.train_labels)
    if count > total:
        raise UserError(f"{images.name} has {total} training images, the protocol takes {count} at a time")
    per_round = total // count
    order = _shuffle(images, seed, purpose, index // per_round)
    start = index % per_round * count
    return order[start : start + count]


def _random_labels(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    return torch.randint(images.classes, (count,), generator=generator(seed, f"{purpose}_labels", index))


def _epochs(epochs: int | Sequence[int], count: int) -> list[int]:
    return [epochs] * count if isinstance(epochs, int) else list(epochs)
