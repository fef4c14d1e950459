"""Protocols: the data of each phase, as pure functions of the data set, the run's seed and the protocol's settings.

`warm_start`, `continual` and `class_incremental` are the paper's (Figure 2a, b, c). `random_label`, `label_noise` and
`permuted` are probes from the literature that show a loss of plasticity in minutes.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import ListConfig
from torch import Tensor

from fire_core.errors import UserError
from harness.runs.seeding import generator, numpy_generator
from vision.images import Images
from vision.official import switches

# The fields of each phase's `PhaseData`, without `index` and `epochs`, and without `labels` where they are the true ones.
Phases = Iterator[dict[str, Any]]
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


def make_phases(
    name: str, images: Images, seed: int, *, epochs: Epochs = 1, splits: str = "ours", **settings: Any
) -> list[PhaseData]:
    """Return all phases of protocol `name`, in order. Settings are those of the function of that name in this file.

    splits: "official" draws the paper's protocols as the authors' code does, so that a seed selects the same images.
    Raises UserError for settings that do not fit the data set.
    """
    build = PROTOCOLS[name]
    if "splits" in inspect.signature(build).parameters:
        settings["splits"] = splits
    phases, labels, device = [], images.train_labels.cpu(), images.train_labels.device
    for index, fields in enumerate(build(images, seed, **settings)):
        fields = {"labels": labels[fields["indices"]]} | fields
        there = {key: part.to(device) if isinstance(part, Tensor) else part for key, part in fields.items()}
        phases.append(PhaseData(index, epochs=epochs if isinstance(epochs, int) else epochs[index], **there))
    return phases


def phase_count(name: str, **settings: Any) -> int:
    """Return the number of phases of protocol `name`. Raises UserError for a setting that it does not have."""
    known = inspect.signature(PROTOCOLS[name]).parameters
    if surplus := settings.keys() - (own := ["epochs", *list(known)[2:]]):
        raise UserError(f"protocol {name} has no setting {min(surplus)!r}: it has {', '.join(own)}")
    counts = [settings.get(key, known[key].default) for key in ("stages", "tasks") if key in known]
    return counts[0] if counts else 2


def warm_start(images: Images, seed: int, *, share: float = 0.1, splits: str = "ours") -> Phases:
    """Yield two phases: a random `share` of the training set, then all of it (paper, Figure 2a)."""
    return _growing_shares(_order(images, seed, "warm_start", splits), [share, 1.0])


def continual(
    images: Images, seed: int, *, stages: int = 10, replay: float = 1.0, splits: str = "ours"
) -> Phases:
    """Yield `stages` phases: 1/stages of the training set, then 2/stages, ... and all of it (paper, Figure 2b).

    replay: later phases keep only this share of the images that a phase added, always the same ones.
    """
    shares = [(stage + 1) / stages for stage in range(stages)]
    return _growing_shares(_order(images, seed, "continual", splits), shares, replay)


def class_incremental(
    images: Images, seed: int, *, stages: int = 20, replay: float | None = None, splits: str = "ours"
) -> Phases:
    """Yield `stages` phases that each add the same number of classes to those before (paper, Figure 2c).

    The seed gives the order of the classes. If `stages` does not divide their number, the first phases add one more.
    replay: later phases keep only this share of the images of each class, always the same ones; None keeps all.
    """
    if stages > images.classes:
        raise UserError(f"protocol.stages={stages}: {images.name} has only {images.classes} classes")
    if splits == "official":
        order = switches.orders(images, seed)[1]
    else:
        order = numpy_generator(seed, "class_incremental").permutation(images.classes)
    labels, parts = images.train_labels.cpu(), torch.from_numpy(order).tensor_split(stages)
    stays = torch.zeros(len(labels), dtype=torch.bool)
    for index, part in enumerate(parts):
        seen, new = torch.cat(parts[: index + 1]).sort().values, part.sort().values
        chosen = torch.isin(labels, seen).nonzero().flatten()
        # data sets may be sorted by class, and plasticity is measured on the first images
        chosen = chosen[torch.randperm(len(chosen), generator=generator(seed, "class_incremental", index))]
        if replay is not None:
            chosen = chosen[torch.isin(labels[chosen], new) | stays[chosen]]
            for label in new.tolist():
                of_class = chosen[labels[chosen] == label]
                stays[of_class[: round(replay * len(of_class))]] = True
        fields = {"name": f"{len(seen)} classes", "indices": chosen, "seen": seen}
        yield fields if replay is None else fields | {"new": new}


def random_label(images: Images, seed: int, *, tasks: int = 20, count: int = 1000) -> Phases:
    """Yield `tasks` phases, each with `count` new images and random labels to memorise; train accuracy is measured.

    Lyle et al. 2023, Kumar et al. 2023. Images are taken from one shuffle of the training set after another. If fewer
    than `count` are left of a shuffle, they are not used.
    """
    for index in range(tasks):
        chosen = _fresh(images, seed, "random_label", index, count)
        labels = _random_labels(images, seed, "random_label", index, count)
        yield {"name": f"task {index + 1}", "indices": chosen, "labels": labels}


def label_noise(images: Images, seed: int, *, noisy: int = 3000, clean: int = 5000) -> Phases:
    """Yield two phases: random labels of `noisy` images (train accuracy), then true ones of `clean` (test accuracy).

    Both take the first images of the same shuffle, so the smaller set is part of the larger one.
    """
    first, second = (_fresh(images, seed, "label_noise", 0, count) for count in (noisy, clean))
    labels = _random_labels(images, seed, "label_noise", 0, noisy)
    yield {"name": "random labels", "indices": first, "labels": labels}
    yield {"name": "true labels", "indices": second}


def permuted(images: Images, seed: int, *, tasks: int = 10, count: int | None = None) -> Phases:
    """Yield `tasks` phases, each with a new order of the pixels of all images; test accuracy is measured.

    Each phase has `count` images, chosen as in `random_label`; None takes the whole training set.
    """
    for index in range(tasks):
        chosen = _fresh(images, seed, "permuted", index, count or len(images.train_labels))
        order = torch.randperm(images.image_size**2, generator=generator(seed, "pixels", index))
        yield {"name": f"order {index + 1}", "indices": chosen, "permutation": order}


PROTOCOLS: dict[str, Callable[..., Phases]] = {
    build.__name__: build
    for build in (warm_start, continual, class_incremental, random_label, label_noise, permuted)
}


def _growing_shares(order: Tensor, shares: list[float], replay: float = 1.0) -> Phases:
    """Yield a phase for each of the rising `shares` of the images, which are taken in the given order."""
    stays, end = order[:0], 0
    for share in shares:
        start, end = end, max(1, round(share * len(order)))
        added = order[start:end]
        yield {"name": f"{share:.0%} of the data", "indices": torch.cat([stays, added])}
        stays = torch.cat([stays, added[: round(replay * len(added))]])


def _order(images: Images, seed: int, purpose: str, splits: str = "ours", number: int = 0) -> Tensor:
    """Return an order of the training images, (n,) int64: shuffle `number` of this purpose, or the official one."""
    if splits == "official":
        return torch.from_numpy(switches.orders(images, seed)[0])
    return torch.from_numpy(numpy_generator(seed, purpose, number).permutation(len(images.train_labels)))


def _fresh(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    """Return block `index` of `count` images from an endless sequence of shuffles. No image occurs twice in a block."""
    total = len(images.train_labels)
    if count > total:
        raise UserError(f"{images.name} has {total} training images, the protocol takes {count} at a time")
    shuffle, block = divmod(index, total // count)
    return _order(images, seed, purpose, number=shuffle)[block * count : (block + 1) * count]


def _random_labels(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    return torch.randint(images.classes, (count,), generator=generator(seed, f"{purpose}_labels", index))
