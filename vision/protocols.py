"""Protocols: the data of each phase, as pure functions of the data set, the run's seed and the protocol's settings.

`warm_start`, `continual` and `class_incremental` are the paper's (Figure 2a, b, c). `random_label`, `label_noise` and
`permuted` are probes from the literature that show a loss of plasticity in minutes. No loader has state: a resumed run
calls the same functions again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fire_core.errors import UserError
from harness.runs.seeding import generator, numpy_generator
from harness.transfer import send
from vision import official
from vision.images import Images


@dataclass(frozen=True)
class PhaseData:
    """The data of one phase, with all tensors on the data set's device.

    indices: (n,) int64 into the training set. labels: (n,) int64 in the same order, true ones or the probe's.
    epochs: length of the phase. seen: sorted classes trained on so far, None if the protocol adds no classes.
    new: those of `seen` that this phase adds, None unless `replay` was given.
    permutation: (height * width,) int64 order of the pixels, None for the usual one. measure: "test" or "train",
    the accuracy that matters in this phase.
    """

    index: int
    name: str
    indices: Tensor
    labels: Tensor
    epochs: int
    seen: Tensor | None = None
    new: Tensor | None = None
    permutation: Tensor | None = None
    measure: str = "test"

    def arrange(self, pictures: Tensor) -> Tensor:
        """Return images (n, channels, height, width) with their pixels in this phase's order."""
        if self.permutation is None:
            return pictures
        return pictures.flatten(2)[..., self.permutation].view_as(pictures)


def prepare(
    images: Images, phase: PhaseData, indices: Tensor, labels: Tensor | None = None, *, test: bool = False
) -> tuple[Tensor, Tensor]:
    """Return normalised float32 images (n, channels, height, width), pixels in the phase's order, and their labels.

    indices: (n,) into the training set, or with `test` into the test set. labels: (n,); None takes the data set's own.
    """
    pictures, own = (
        (images.test_images, images.test_labels) if test else (images.train_images, images.train_labels)
    )
    return images.normalise(phase.arrange(pictures[indices]), test=test), own[
        indices
    ] if labels is None else labels


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
    Raises UserError for an unknown protocol or setting, and for settings that do not fit the data set.
    """
    if name not in PROTOCOLS:
        raise UserError(f"protocol {name!r} is unknown: use one of {', '.join(PROTOCOLS)}")
    build = PROTOCOLS[name]
    known = list(inspect.signature(build).parameters)[2:]
    for key in settings:
        if key not in known:
            raise UserError(f"protocol {name} has no setting {key!r}: it has {', '.join(known)}")
    if "splits" in known:
        settings["splits"] = splits
    return build(images, seed, **settings)


def warm_start(
    images: Images,
    seed: int,
    *,
    share: float = 0.1,
    epochs: int | Sequence[int] = (1000, 100),
    splits: str = "ours",
) -> list[PhaseData]:
    """Return two phases: a random `share` of the training set, then all of it (paper, Figure 2a)."""
    if not 0.0 < share <= 1.0:
        raise UserError(f"protocol.share={share} is outside (0, 1]")
    return _growing(images, seed, "warm_start", [share, 1.0], epochs, splits)


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
    shares = [(stage + 1) / stages for stage in range(_positive("stages", stages))]
    return _growing(images, seed, "continual", shares, epochs, splits, replay)


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
    _share("replay", replay)
    if _positive("stages", stages) > images.classes:
        raise UserError(
            f"protocol.stages={stages} is more than the {images.classes} classes of {images.name}"
        )
    if splits == "official":
        order = official.class_order(images, seed)
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
                stays[_first(chosen[labels[chosen] == label], replay)] = True
        result.append(_phase(images, index, f"{len(seen)} classes", chosen, lengths[index], **classes))
    return result


def random_label(
    images: Images, seed: int, *, tasks: int = 20, count: int = 1000, epochs: int | Sequence[int] = 30
) -> list[PhaseData]:
    """Return `tasks` phases, each with `count` new images and random labels to memorise; train accuracy is measured.

    Lyle et al. 2023, Kumar et al. 2023. Images are taken from one shuffle of the training set after another. If fewer
    than `count` are left of a shuffle, they are not used.
    """
    lengths = _epochs(epochs, _positive("tasks", tasks))
    result = []
    for index in range(tasks):
        chosen = _fresh(images, seed, "random_label", index, count)
        labels = _random_labels(images, seed, "random_label", index, count)
        name = f"task {index + 1}"
        result.append(_phase(images, index, name, chosen, lengths[index], labels=labels, measure="train"))
    return result


def label_noise(
    images: Images,
    seed: int,
    *,
    noisy: int = 3000,
    clean: int = 5000,
    epochs: int | Sequence[int] = (30, 30),
) -> list[PhaseData]:
    """Return two phases: random labels of `noisy` images (train accuracy), then true ones of `clean` (test accuracy).

    Both take the first images of the same shuffle, so the smaller set is part of the larger one.
    """
    lengths = _epochs(epochs, 2)
    first = _fresh(images, seed, "label_noise", 0, noisy)
    labels = _random_labels(images, seed, "label_noise", 0, noisy)
    second = _shuffle(images, seed, "label_noise", 0)[: _available("clean", clean, images)]
    return [
        _phase(images, 0, "random labels", first, lengths[0], labels=labels, measure="train"),
        _phase(images, 1, "true labels", second, lengths[1]),
    ]


def permuted(
    images: Images,
    seed: int,
    *,
    tasks: int = 10,
    count: int | None = None,
    epochs: int | Sequence[int] = 10,
) -> list[PhaseData]:
    """Return `tasks` phases, each with a new order of the pixels of all images; test accuracy is measured.

    Each phase has `count` images, chosen as in `random_label`; None takes the whole training set.
    """
    lengths = _epochs(epochs, _positive("tasks", tasks))
    pixels = images.image_size**2
    count = len(images.train_labels) if count is None else count
    result = []
    for index in range(tasks):
        chosen = _fresh(images, seed, "permuted", index, count)
        order = torch.randperm(pixels, generator=generator(seed, "pixels", index))
        result.append(_phase(images, index, f"order {index + 1}", chosen, lengths[index], permutation=order))
    return result


PROTOCOLS: dict[str, Callable[..., list[PhaseData]]] = {
    build.__name__: build
    for build in (warm_start, continual, class_incremental, random_label, label_noise, permuted)
}


def _growing(
    images: Images,
    seed: int,
    purpose: str,
    shares: list[float],
    epochs: int | Sequence[int],
    splits: str,
    replay: float | None = None,
) -> list[PhaseData]:
    _share("replay", replay)
    if splits == "official":
        order = torch.from_numpy(official.image_order(images, seed))
    else:
        order = _shuffle(images, seed, purpose, 0)
    lengths = _epochs(epochs, len(shares))
    result: list[PhaseData] = []
    stays, end = order[:0], 0
    for index, share in enumerate(shares):
        start, end = end, max(1, round(share * len(order)))
        chosen = torch.cat([stays, order[start:end]])
        stays = torch.cat([stays, _first(order[start:end], 1.0 if replay is None else replay)])
        result.append(_phase(images, index, f"{share:.0%} of the data", chosen, lengths[index]))
    return result


def _first(indices: Tensor, share: float) -> Tensor:
    """Return the first `share` of the indices."""
    return indices[: round(share * len(indices))]


def _shuffle(images: Images, seed: int, purpose: str, round_number: int) -> Tensor:
    order = numpy_generator(seed, purpose, round_number).permutation(len(images.train_labels))
    return torch.from_numpy(order.astype(np.int64))


def _fresh(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    """Return block `index` of `count` images from an endless sequence of shuffles. No image occurs twice in a block."""
    total = len(images.train_labels)
    per_round = total // _available("count", count, images)
    order = _shuffle(images, seed, purpose, index // per_round)
    start = index % per_round * count
    return order[start : start + count]


def _random_labels(images: Images, seed: int, purpose: str, index: int, count: int) -> Tensor:
    return torch.randint(images.classes, (count,), generator=generator(seed, f"{purpose}_labels", index))


def _available(key: str, count: int, images: Images) -> int:
    total = len(images.train_labels)
    if not 0 < count <= total:
        raise UserError(
            f"protocol.{key}={count}: {images.name} has {total} training images, take 1 to {total}"
        )
    return count


def _positive(key: str, value: int) -> int:
    if value < 1:
        raise UserError(f"protocol.{key}={value} must be at least 1")
    return value


def _share(key: str, value: float | None) -> None:
    if value is not None and not 0.0 <= value <= 1.0:
        raise UserError(f"protocol.{key}={value} is outside [0, 1]")


def _epochs(epochs: int | Sequence[int], count: int) -> list[int]:
    lengths = [epochs] * count if isinstance(epochs, int) else list(epochs)
    if len(lengths) != count or min(lengths) < 1:
        raise UserError(
            f"protocol.epochs={epochs}: give one positive number, or {count} of them, one per phase"
        )
    return lengths


def _phase(
    images: Images,
    index: int,
    name: str,
    indices: Tensor,
    epochs: int,
    *,
    labels: Tensor | None = None,
    seen: Tensor | None = None,
    new: Tensor | None = None,
    permutation: Tensor | None = None,
    measure: str = "test",
) -> PhaseData:
    device = images.train_labels.device
    indices, labels, seen, new, permutation = (
        None if part is None else part.to(device) for part in (indices, labels, seen, new, permutation)
    )
    labels = images.train_labels[indices] if labels is None else labels
    return PhaseData(index, name, indices, labels, epochs, seen, new, permutation, measure)
