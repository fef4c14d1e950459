"""Image data sets as uint8 tensors on the training device.

images = load("fashion_mnist", image_size=32, channels=3, device="cpu")
batch = images.normalise(images.train_images[indices])
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fire_core.errors import UserError, first_line, print_error
from fire_core.files import remove_torn, written_aside
from harness.runs.folders import FolderLock
from vision.images import Images, pixel_statistics
from vision.readers import TORCHVISION, Arrays, read_class_folders, read_published
from vision.torchvision_import import import_torchvision

SHIPPED = Path(__file__).parent / "assets" / "fashion_mnist_subset.npz"
TINY_IMAGENET = "https://cs231n.stanford.edu/tiny-imagenet-200.zip"
TINY_IMAGENET_MD5 = "90528d7ca1a48142e341f4ef8d21d0de"
PUBLISHED = (*TORCHVISION, "tiny_imagenet")
# Data sets that may come as class folders: number of classes and pixels per side.
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
        folder: the files: as published, or for `AS_CLASS_FOLDERS` and "image_folder" as images in train/<class>/ and
            test/<class>/. None reads `root`/<name>, and downloads published data that are missing.
        root: folder of downloads and of decoded copies of image folders.
        image_size: pixels per side; None keeps the data's own. Smaller images are padded with black (fit="pad") or
            interpolated (fit="resize"), larger ones interpolated with antialiasing. "image_folder" is always scaled.
        channels: 3 repeats grey images, 1 takes the luminance; None keeps the data's own (3 for "image_folder").
        classes, train_per_class, test_per_class: use only so many classes, and images of each, the first ones.
    Raises: UserError for missing or unreadable data, and for fewer images than asked for.
    """
    root = Path(root)
    if name == "image_folder":
        place, size = _existing(folder or root / name), {"image_size": image_size, "channels": channels or 3}
        arrays = read_class_folders(place, **size, cache=root / "decoded")
    elif name == "fashion_mnist":
        arrays = _shipped(folder)
    elif folder is None:
        arrays = download(name, root)
    else:
        arrays = _read(name, _existing(folder), root)
    count = classes or arrays.classes
    if count > arrays.classes:
        raise UserError(f"data.classes={classes}: {name} has {arrays.classes} classes")

    def prepared(images: np.ndarray, labels: np.ndarray, per_class: int | None) -> tuple[Tensor, Tensor]:
        chosen = np.flatnonzero(labels < count)
        if per_class is not None:
            chosen = chosen[first_of_each_class(labels[chosen], per_class)]
        # a copy, because indexing leaves strides that make torch compute grey images in another order
        found = _with_channels(torch.from_numpy(np.array(images[chosen])), channels)
        return _with_size(found, image_size, fit).contiguous(), torch.from_numpy(labels[chosen])

    train = prepared(arrays.train_images, arrays.train_labels, train_per_class)
    test = prepared(arrays.test_images, arrays.test_labels, test_per_class)
    mean, std = pixel_statistics(train[0])
    tensors = [tensor.to(device) for tensor in (*train, *test)]
    return Images(name, *tensors, count, mean.to(device), std.to(device))


def download(name: str, root: str | Path = "data") -> Arrays:
    """Return a data set of PUBLISHED below `root`, after downloading and unpacking what is missing.

    Raises UserError if it cannot be had or read.
    """
    place = Path(root) / name
    with FolderLock(place):  # runs of a sweep may ask for the same data at the same time
        try:
            if name in TORCHVISION:
                return read_published(name, place, download=True)
            if not (unpacked := place / "unpacked").is_dir():
                remove_torn(place)
                files = import_torchvision().datasets.utils
                with written_aside(unpacked, durable=False) as aside:
                    files.download_and_extract_archive(TINY_IMAGENET, place, aside, md5=TINY_IMAGENET_MD5)
        except Exception as error:  # of the network, the disk, or a damaged archive
            raise UserError(
                f"{name} cannot be had ({first_line(error)}): run again, delete {place} to download it again, or name a "
                "folder that has it with data.folder=FOLDER"
            ) from error
        return _read(name, unpacked, Path(root))


def _existing(folder: str | Path) -> Path:
    place = Path(folder).expanduser()
    if not place.is_dir():
        raise UserError(f"{folder} does not exist: name the folder of the images with data.folder=FOLDER")
    return place


def _shipped(folder: str | Path | None) -> Arrays:
    if folder is not None:
        raise UserError(
            f"data.folder={folder}: fashion_mnist ships with the code and reads no folder; for your own pictures "
            "add data=image_folder, for all of Fashion-MNIST data=fashion_mnist_full"
        )
    with np.load(SHIPPED) as stored:
        images = [stored[f"{part}_images"][:, None] for part in ("train", "test")]
        labels = [stored[f"{part}_labels"].astype(np.int64) for part in ("train", "test")]
    return Arrays(images[0], labels[0], images[1], labels[1], classes=10)


def _read(name: str, folder: Path, root: Path) -> Arrays:
    """Return the published data set that a folder holds, as torchvision unpacks it or as class folders."""
    if name == "tiny_imagenet" and (inner := folder / "tiny-imagenet-200").is_dir():
        folder = inner
    if name in TORCHVISION and not (name in AS_CLASS_FOLDERS and (folder / "train").is_dir()):
        return read_published(name, folder)
    classes, size = AS_CLASS_FOLDERS[name]
    arrays = read_class_folders(folder, image_size=size, channels=3, cache=root / "decoded")
    if (found := arrays.classes) != classes:
        raise UserError(
            f"{folder} has {found} class folders in train, {name} has {classes}: use data=image_folder"
        )
    return arrays


def first_of_each_class(labels: np.ndarray, count: int) -> np.ndarray:
    """Return the sorted positions of the first `count` images of every class. Raises UserError if a class has fewer."""
    chosen = [np.flatnonzero(labels == label)[:count] for label in np.unique(labels)]
    if (fewest := min(map(len, chosen))) < count:
        raise UserError(
            f"a class has {fewest} images, {count} were asked for: set data.train_per_class or data.test_per_class lower"
        )
    return np.sort(np.concatenate(chosen))


def _with_channels(images: Tensor, channels: int | None) -> Tensor:
    if channels is None or channels == images.shape[1]:
        return images
    if channels == 3:
        return images.expand(-1, 3, -1, -1)
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)  # ITU-R BT.601 luminance
    return (images.float() * weights).sum(dim=1, keepdim=True).round_().to(torch.uint8)


def _with_size(images: Tensor, size: int | None, fit: str) -> Tensor:
    have = images.shape[-1]
    if size is None or have == size:
        return images
    if have < size and fit == "pad":
        before = (size - have) // 2
        after = size - have - before
        return functional.pad(images, (before, after, before, after))
    how = {"size": (size, size), "mode": "bilinear", "antialias": True}
    parts = (functional.interpolate(part.float(), **how) for part in images.split(4096))
    return torch.cat([part.round_().to(torch.uint8) for part in parts])


def main() -> None:
    """Download published data sets ahead of training; exit with code 2 if one could not be had or read."""
    parser = argparse.ArgumentParser(description="Download image data ahead of training.")
    parser.add_argument("names", nargs="+", choices=PUBLISHED, metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--root", default="data", help="folder of the data (run.data_root)")
    options = parser.parse_args()
    for name in options.names:
        try:
            arrays = download(name, options.root)
        except UserError as error:
            print_error(error)
            sys.exit(2)
        print(f"{name}: {len(arrays.train_labels):,} training and {len(arrays.test_labels):,} test images")


if __name__ == "__main__":
    main()
