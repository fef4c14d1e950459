"""Data sets as uint8 tensors on the training device, normalised there.

    images = load("fashion_mnist", image_size=32, channels=3, device="cpu")
    batch = images.normalise(images.train_images[indices])

`vision.protocols` decides what is trained on when.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fire_core.errors import UserError
from fire_core.runs.trunk import FolderLock
from vision.download import fetch
from vision.protocols import PROTOCOLS, PhaseData, batch_indices, make_phases, prepare
from vision.readers import (
    Arrays,
    read_cifar,
    read_fashion_mnist,
    read_image_folder,
    read_tiny_imagenet,
    unpack,
)

__all__ = ["DATA_SETS", "PROTOCOLS", "Images", "PhaseData", "batch_indices", "load", "make_phases", "prepare"]

ASSETS = Path(__file__).parent / "assets"
FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
FASHION_URL = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
# Files of each published data set and the MD5 sums that their authors give.
SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    "fashion_mnist_full": (
        (FASHION_URL + "train-images-idx3-ubyte.gz", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
        (FASHION_URL + "train-labels-idx1-ubyte.gz", "25c81989df183df01b3e8a0aad5dffbe"),
        (FASHION_URL + "t10k-images-idx3-ubyte.gz", "bef4ecab320f06d8554ea6380940ec79"),
        (FASHION_URL + "t10k-labels-idx1-ubyte.gz", "bb300cfdad3c16e7a12a480ee83cd310"),
    ),
    "cifar10": (
        ("https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    ),
    "cifar100": (
        ("https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
    ),
    "tiny_imagenet": (
        ("http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de"),
    ),
}
DATA_SETS = ("fashion_mnist", *SOURCES, "image_folder")


@dataclass
class Images:
    """A labelled image data set on one device.

    train_images, test_images: (n, channels, size, size) uint8. train_labels, test_labels: (n,) int64.
    classes: number of classes. mean, std: (channels,) float32 of the training pixels scaled to [0, 1]; test images are
    normalised with them too.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    class_names: tuple[str, ...]
    mean: Tensor
    std: Tensor

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train_images.shape[-1]

    def normalise(self, pictures: Tensor) -> Tensor:
        """uint8 (n, channels, size, size) -> float32 of mean 0 and deviation 1 over the training set."""
        mean, std = (value.view(1, -1, 1, 1) for value in (self.mean, self.std))
        return pictures.to(torch.float32).sub_(255 * mean).mul_(1 / (255 * std))

    def __str__(self) -> str:
        counts = f"{len(self.train_labels)} training and {len(self.test_labels)} test images"
        return f"{self.name}: {counts}, {self.channels}x{self.image_size}x{self.image_size}, {self.classes} classes"


def load(
    name: str,
    folder: str | Path | None = None,
    *,
    root: str | Path = "data",
    image_size: int | None = None,
    fit: str = "pad",
    channels: int | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    device: torch.device | str = "cpu",
) -> Images:
    """Load one of `DATA_SETS` onto `device`.

    Args:
        name: "fashion_mnist" is the balanced subset that ships with the code; "image_folder" is the user's own.
        folder: where the data set's files are; None looks in `root`/<name> and downloads there what is missing.
        root: downloads, and the decoded copies of image folders.
        image_size: None keeps the data's own. Larger: black border (fit="pad") or interpolation (fit="resize").
            Smaller: always interpolation, with antialiasing.
        channels: 3 repeats grey pictures, 1 takes the luminance of coloured ones.
        train_per_class, test_per_class: the first so many of every class, in the data set's order.

    Raises `UserError`, with what to type, when the data are missing or unreadable.
    """
    if name not in DATA_SETS:
        raise UserError(f"data set {name!r} is unknown: use one of {', '.join(DATA_SETS)}")
    if fit not in ("pad", "resize"):
        raise UserError(f"data.fit={fit!r}: use pad or resize")
    if channels not in (None, 1, 3):
        raise UserError(f"data.channels={channels}: use 1, 3 or null")
    arrays = _read(name, folder, Path(root), image_size, channels)
    train = _prepare(arrays.train_images, arrays.train_labels, train_per_class, image_size, channels, fit)
    test = _prepare(arrays.test_images, arrays.test_labels, test_per_class, image_size, channels, fit)
    mean, std = pixel_statistics(train[0])
    tensors = [tensor.to(device) for tensor in (*train, *test)]
    names = arrays.class_names
    return Images(name, *tensors, len(names), names, mean.to(device), std.to(device))


def download(name: str, root: str | Path = "data") -> Path:
    """Fetch (where needed) and unpack a published data set below `root`; returns its folder."""
    target = Path(root) / name
    lock = FolderLock(target)
    for url, md5 in SOURCES[name]:
        archive, unpacked = target / url.rsplit("/", 1)[-1], target / "unpacked"
        packed = not archive.name.endswith("ubyte.gz")
        if (unpacked if packed else archive).exists():
            continue
        lock.acquire(wait=True)  # runs of a sweep may ask for the same data at the same time
        try:
            fetch(url, archive, md5)
            if packed:
                unpack(archive, unpacked)
        finally:
            lock.release()
    return target


def pixel_statistics(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of uint8 pictures scaled to [0, 1], from exact counts.

    Returns two (channels,) float32 tensors. A channel of one single value gets deviation 1, so that it becomes 0.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    means, deviations = [], []
    for channel in pictures.transpose(0, 1):
        counts = torch.bincount(channel.flatten().cpu(), minlength=256).double()
        share = counts / counts.sum()
        mean = (share * values).sum()
        deviation = (share * (values - mean).square()).sum().sqrt()
        means.append(mean)
        deviations.append(deviation if deviation > 0 else torch.ones_like(deviation))
    return torch.stack(means).float(), torch.stack(deviations).float()


def _read(
    name: str, folder: str | Path | None, root: Path, image_size: int | None, channels: int | None
) -> Arrays:
    if name == "fashion_mnist":
        with np.load(ASSETS / "fashion_mnist_subset.npz") as stored:
            parts = [stored[key] for key in ("train_images", "train_labels", "test_images", "test_labels")]
        return Arrays(parts[0][:, None], parts[1].astype(np.int64), parts[2][:, None],
                      parts[3].astype(np.int64), FASHION_CLASSES)  # fmt: skip
    if name == "image_folder" and folder is None:
        folder = root / name
        if not folder.is_dir():
            raise UserError(
                f"data=image_folder needs data.folder=FOLDER with train/<class>/ and test/<class>/ in it (or {folder})"
            )
    if folder is not None:
        place = Path(folder).expanduser()
        if not place.is_dir():
            raise UserError(f"data.folder={folder} does not exist: name the folder that holds {name}")
    else:
        try:
            place = download(name, root)
        except UserError as error:
            raise UserError(f"{error}; or name a folder that has {name} with data.folder=FOLDER") from error
    if name == "fashion_mnist_full":
        return read_fashion_mnist(place, FASHION_CLASSES)
    if name == "tiny_imagenet":
        return read_tiny_imagenet(place, cache=root / "decoded")
    if name == "image_folder":
        return read_image_folder(place, image_size=image_size, channels=channels or 3, cache=root / "decoded")
    return read_cifar(place, 10 if name == "cifar10" else 100)


def _prepare(
    pictures: np.ndarray,
    labels: np.ndarray,
    per_class: int | None,
    size: int | None,
    channels: int | None,
    fit: str,
) -> tuple[Tensor, Tensor]:
    if per_class is not None:
        chosen = _first_of_each_class(labels, per_class)
        pictures, labels = pictures[chosen], labels[chosen]
    images = _with_channels(torch.from_numpy(np.array(pictures)), channels)
    if size is not None:
        images = _with_size(images, size, fit)
    return images.contiguous(), torch.from_numpy(np.array(labels, dtype=np.int64))


def _first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    if count < 1:
        raise UserError(f"data takes at least one image per class, not {count}")
    chosen = []
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < count:
            raise UserError(
                f"class {label} has {len(places)} images, {count} were asked for: take fewer per class"
            )
        chosen.append(places[:count])
    return np.sort(np.concatenate(chosen))


def _with_channels(images: Tensor, channels: int | None) -> Tensor:
    if channels is None or channels == images.shape[1]:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R BT.601 luminance
    return (images.float() * weights).sum(dim=1, keepdim=True).round_().to(torch.uint8)


def _with_size(images: Tensor, size: int, fit: str) -> Tensor:
    have = images.shape[-1]
    if have == size:
        return images
    if have < size and fit == "pad":
        before = (size - have) // 2
        after = size - have - before
        return functional.pad(images, (before, after, before, after))
    parts = [
        functional.interpolate(
            part.float(), (size, size), mode="bilinear", antialias=True, align_corners=False
        )
        .round_()
        .to(torch.uint8)
        for part in images.split(4096)
    ]
    return torch.cat(parts)
