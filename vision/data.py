"""Image data sets as uint8 tensors on the training device.

    images = load("fashion_mnist", image_size=32, channels=3, device="cpu")
    batch = images.normalise(images.train_images[indices])

`vision.protocols` selects the images of each phase.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fire_core.errors import UserError, first_line, shown
from fire_core.files import remove_torn, written_aside
from harness.runs.folders import FolderLock
from vision.images import Images, pixel_statistics
from vision.readers import (
    TORCHVISION,
    Arrays,
    class_folders,
    read_class_folders,
    read_published,
    read_tiny_imagenet,
    test_folder,
    tiny_imagenet_root,
)
from vision.torchvision_import import import_torchvision

ASSETS = Path(__file__).parent / "assets"
FASHION_CLASSES = tuple(
    ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"]
)


TINY_IMAGENET = (
    "https://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "90528d7ca1a48142e341f4ef8d21d0de",
)  # MD5
PUBLISHED = (*TORCHVISION, "tiny_imagenet")
# Data sets that may also come as class folders: number of classes and pixels per side.
AS_CLASS_FOLDERS = {"cifar10": (10, 32), "cifar100": (100, 32), "tiny_imagenet": (200, 64)}


def load(
    name: str,
    folder: str | Path | None = None,
    *,
    root: str | Path = "data",
    image_size: int | None = None,
    fit: str = "pad",
    channels: int | None = None,
    classes: int | None = None,
    train_per_class: int | None = None,
    test_per_class: int | None = None,
    device: torch.device | str = "cpu",
) -> Images:
    """Return a data set on `device`.

    Args:
        name: "fashion_mnist" is the balanced subset that ships with the code; "image_folder" is the user's own data.
        folder: the data set's files: as published, or for `AS_CLASS_FOLDERS` and "image_folder" as images in
            train/<class>/ and test/<class>/. None reads `root`/<name>, and downloads published data that are missing.
            Not for "fashion_mnist".
        root: folder of downloads and of decoded copies of image folders.
        image_size: pixels per side; None keeps the data's own. Smaller images are padded with black (fit="pad") or
            interpolated (fit="resize"), larger ones interpolated with antialiasing. "image_folder" is always scaled.
        channels: 3 repeats grey images, 1 takes the luminance of coloured ones; None keeps the data's own
            (3 for "image_folder").
        classes: use only this many classes, the first ones.
        train_per_class, test_per_class: use only this many images of every class, the first ones.
    Raises: UserError for missing or unreadable data, and for fewer images than asked for.
    """
    arrays = _read(name, folder, Path(root), image_size, channels)
    names = arrays.class_names
    if classes is not None and classes > len(names):
        raise UserError(f"data.classes={classes}: {name} has {len(names)} classes")
    names = names[:classes]
    for part, labels in (("training", arrays.train_labels), ("test", arrays.test_labels)):
        counts = np.bincount(labels, minlength=len(names))[: len(names)]
        if not counts.all():
            empty = shown(names[int(counts.argmin())])
            raise UserError(f"class {empty!r} of {name} has no {part} image: add some, or remove the class")

    def prepared(images: np.ndarray, labels: np.ndarray, per_class: int | None) -> tuple[Tensor, Tensor]:
        chosen = np.flatnonzero(labels < len(names))
        if per_class is not None:
            chosen = chosen[first_of_each_class(labels[chosen], per_class)]
        # a copy, because indexing leaves strides that make torch compute grey images in another order
        found = _with_channels(torch.from_numpy(np.array(images[chosen])), channels)
        found = found if image_size is None else _with_size(found, image_size, fit)
        return found.contiguous(), torch.from_numpy(labels[chosen])

    train = prepared(arrays.train_images, arrays.train_labels, train_per_class)
    test = prepared(arrays.test_images, arrays.test_labels, test_per_class)
    mean, std = pixel_statistics(train[0])
    tensors = [tensor.to(device) for tensor in (*train, *test)]
    return Images(name, *tensors, len(names), names, mean.to(device), std.to(device))


def download(name: str, root: str | Path = "data") -> Arrays:
    """Return a data set of PUBLISHED below `root`, after downloading and unpacking what is missing.

    Damaged files of CIFAR and Fashion-MNIST are replaced. Raises UserError if the right file cannot be had, or if the files
    that it unpacks to are unreadable.
    """
    place = Path(root) / name
    with FolderLock(place):  # runs of a sweep may ask for the same data at the same time
        if name == "tiny_imagenet":
            return _download_tiny_imagenet(place, Path(root) / "decoded")
        try:
            return read_published(name, place)
        except UserError:
            # torchvision unpacks only files that do not exist
            for file in place.glob("FashionMNIST/raw/*-ubyte"):
                file.unlink()
            return read_published(name, place, download=True)


def _download_tiny_imagenet(place: Path, cache: Path) -> Arrays:
    (url, md5), unpacked = TINY_IMAGENET, place / "unpacked"
    archive = place / Path(url).name
    if not unpacked.is_dir():
        remove_torn(place)
        torchvision_utils = import_torchvision().datasets.utils
        try:
            torchvision_utils.download_url(url, place, md5=md5)
            with written_aside(unpacked, durable=False) as aside:
                torchvision_utils.extract_archive(archive, aside)
        except Exception as error:  # of the network, the disk, or a damaged archive
            raise UserError(
                f"tiny_imagenet cannot be had from {url} ({first_line(error)}): run again, or put the file at {archive}"
            ) from error
    try:
        return read_tiny_imagenet(unpacked, cache=cache)
    except UserError as error:
        raise UserError(
            f"{error}; or delete {shown(unpacked)} to unpack the published archive again"
        ) from error


def _read(
    name: str, folder: str | Path | None, root: Path, image_size: int | None, channels: int | None
) -> Arrays:
    if name == "fashion_mnist":
        if folder is not None:
            raise UserError(
                f"data.folder={folder}: fashion_mnist ships with the code and reads no folder; for your own pictures "
                "add data=image_folder, for all of Fashion-MNIST data=fashion_mnist_full"
            )
        with np.load(ASSETS / "fashion_mnist_subset.npz") as stored:
            parts = [stored[key] for key in ("train_images", "train_labels", "test_images", "test_labels")]
        return Arrays(parts[0][:, None], parts[1].astype(np.int64), parts[2][:, None],
                      parts[3].astype(np.int64), FASHION_CLASSES)  # fmt: skip
    if folder is None and name == "image_folder":
        folder = root / name
        if not folder.is_dir():
            raise UserError(
                f"data=image_folder needs data.folder=FOLDER with train/<class>/ and test/<class>/ in it (or {folder})"
            )
    if folder is None:
        try:
            return download(name, root)
        except UserError as error:
            raise UserError(f"{error}; or name a folder that has {name} with data.folder=FOLDER") from error
    return _read_folder(name, Path(folder), root / "decoded", image_size, channels)


def _read_folder(
    name: str, folder: Path, cache: Path, image_size: int | None, channels: int | None
) -> Arrays:
    """Return the data set that a folder of the user's holds, as published or as class folders."""
    place = folder.expanduser()
    if not place.is_dir():
        raise UserError(f"data.folder={folder} does not exist: name the folder that holds {name}")
    if name == "image_folder":
        return read_class_folders(place, image_size=image_size, channels=channels or 3, cache=cache)
    if name == "tiny_imagenet" and tiny_imagenet_root(place):
        return read_tiny_imagenet(place, cache=cache)
    if name in AS_CLASS_FOLDERS and (place / "train").is_dir() and test_folder(place):
        classes, size = AS_CLASS_FOLDERS[name]
        found = len(class_folders(place / "train"))
        if found != classes:
            raise UserError(
                f"data.folder={folder} has {found} class folders in train, {name} has {classes}: use data=image_folder"
            )
        return read_class_folders(place, image_size=size, channels=3, cache=cache)
    if name == "tiny_imagenet":
        raise UserError(
            f"data.folder={folder} holds neither the unpacked tiny-imagenet-200.zip nor train/<class>/ and test/<class>/"
        )
    try:
        return read_published(name, place)
    except UserError as error:
        also = ", nor train/<class>/ and test/<class>/ folders" if name in AS_CLASS_FOLDERS else ""
        raise UserError(f"data.folder={folder}: {error}{also}") from error


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted positions of the first `count` images of every class. Raises UserError if a class has fewer."""
    chosen = []
    for label in np.unique(labels):
        places = np.flatnonzero(labels == label)
        if len(places) < count:
            raise UserError(
                f"class {label} has {len(places)} images, {count} were asked for: set data.train_per_class or "
                "data.test_per_class lower"
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
