"""Protocols: the data of each phase, as pure functions of the data set, the run's seed and the protocol's settings.

`warm_start`, `continual` and `class_incremental` are the paper's (Figure 2a, b, c). `random_label`, `label_noise` and
`permuted` are probes from the literature that show a loss of plasticity in minutes.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from omegaconf import ListConfig
from torch import Tensor

from fire_core.errors import UserError
from harness.runs.seeding import generator, numpy_generator
from vision.images import Images
from vision.official import switches

Epochs = int | Sequence[int]  # of every phase, or of each


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

    def __len__(self) -> int:
        """Number of images."""
        return len(self.indices)

    def __str__(self) -> str:
        return f"phase {self.index} ({self.name})"

    def own(self, setting: float | ListConfig) -> float:
        """Return the value of a setting, which may have one for each phase."""
        return setting[self.index] if isinstance(setting, ListConfig) else setting

    def to(self, device: torch.device) -> PhaseData:
        """Return the phase with all tensors on `device`."""
        return PhaseData(*(v.to(device) if isinstance(v, Tensor) else v for v in vars(self).values()))


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


def warm_start(
    images: Images, seed: int, *, share: float = 0.1, epochs: Epochs = (1000, 100), splits: str = "ours"
) -> list[PhaseData]:
    """Return two phases: a random `share` of the training set, then all of it (paper, Figure 2a)."""
    return _growing_shares(images, _order(images, seed, "warm_start", splits), [share, 1.0], epochs)


def continual(
    images: Images,
    seed: int,
    *,
    stages: int = 10,
    epochs: Epochs = 100,
    replay: float | None = None,
    splits: str = "ours",
) -> list[PhaseData]:
    """Return `stages` phases: 1/stages of the training set, then 2/stages, ... and all of it (paper, Figure 2b).

    replay: later phases keep only this share of the images that a phase added, always the same ones; None keeps all.
    """
    shares = [(stage + 1) / stages for stage in range(stages)]
    return _growing_shares(images, _order(images, seed, "continual", splits), shares, epochs, replay)


def class_incremental(
    images: Images,
    seed: int,
    *,
    stages: int = 20,
    epochs: Epochs = 100,
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
    labels, result = images.train_labels.cpu(), []
    stays = torch.zeros(len(labels), dtype=torch.bool)
    parts = np.array_split(order, stages)
    for index, length in enumerate(_epochs(epochs, stages)):
        seen = torch.from_numpy(np.sort(np.concatenate(parts[: index + 1])))
        chosen = torch.isin(labels, seen).nonzero().flatten()
        # data sets may be sorted by class, and plasticity is measured on the first images
        chosen = chosen[torch.randperm(len(chosen), generator=generator(seed, "class_incremental", index))]
        new = None
        if replay is not None:
            new = torch.from_numpy(np.sort(parts[index]))
            chosen = chosen[torch.isin(labels[chosen], new) | stays[chosen]]
            for label in new.tolist():
                of_class = chosen[labels[chosen] == label]
                stays[of_class[: round(replay * len(of_class))]] = True
        result.append(PhaseData(index, f"{len(seen)} classes", chosen, labels[chosen], length, seen, new))
    return result


def random_label(
    images: Images, seed: int, *, tasks: int = 20, count: int = 1000, epochs: Epochs = 30
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
    images: Images, seed: int, *, noisy: int = 3000, clean: int = 5000, epochs: Epochs = (30, 30)
) -> list[PhaseData]:
    """Return two phases: random labels of `noisy` images (train accuracy), then true ones of `clean` (test accuracy).

    Both take the first images of the same shuffle, so the smaller set is part of the larger one.
    """
    first, second = (_fresh(images, seed, "label_noise", 0, count) for count in (noisy, clean))
    labels, lengths = _random_labels(images, seed, "label_noise", 0, noisy), _epochs(epochs, 2)
    true = images.train_labels.cpu()[second]
    return [
        PhaseData(0, "random labels", first, labels, lengths[0]),
        PhaseData(1, "true labels", second, true, lengths[1]),
    ]


def permuted(
    images: Images, seed: int, *, tasks: int = 10, count: int | None = None, epochs: Epochs = 10
) -> list[PhaseData]:
    """Return `tasks` phases, each with a new order of the pixels of all images; test accuracy is measured.

    Each phase has `count` images, chosen as in `random_label`; None takes the whole training set.
    """
    labels, result = images.train_labels.cpu(), []
    for index, length in enumerate(_epochs(epochs, tasks)):
        chosen = _fresh(images, seed, "permuted", index, count or len(labels))
        order = torch.randperm(images.image_size**2, generator=generator(seed, "pixels", index))
        part = PhaseData(index, f"order {index + 1}", chosen, labels[chosen], length, permutation=order)
        result.append(part)
    return result


PROTOCOLS: dict[str, Callable[..., list[PhaseData]]] = {
    build.__name__: build
    for build in (warm_start, continual, class_incremental, random_label, label_noise, permuted)
}


def _growing_shares(
    images: Images, order: Tensor, shares: list[float], epochs: Epochs, replay: float | None = None
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


def _order(images: Images, seed: int, purpose: str, splits: str = "ours", number: int = 0) -> Tensor:
    """Return an order of the training images, (n,) int64: shuffle `number` of this purpose, or the official one."""
    if splits == "official":
        return torch.from_numpy(switches.orders(images, seed)[0])
    order = numpy_generator(seed, purpose, number).permutation(len(images.train_labels))
    return torch.from_numpy(order.astype(np.int64))


def _fresh(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    """Return block `index` of `count` images from an endless sequence of shuffles. No image occurs twice in a block."""
    total = len(images.train_labels)
    if count > total:
        raise UserError(f"{images.name} has {total} training images, the protocol takes {count} at a time")
    shuffle, block = divmod(index, total // count)
    return _order(images, seed, purpose, number=shuffle)[block * count : (block + 1) * count]


def _random_labels(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    return torch.randint(images.classes, (count,), generator=generator(seed, f"{purpose}_labels", index))


def _epochs(epochs: Epochs, count: int) -> list[int]:
    return [epochs] * count if isinstance(epochs, int) else list(epochs)
