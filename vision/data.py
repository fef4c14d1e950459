"""Image data sets as uint8 tensors on the training device.

images = load("fashion_mnist", image_size=32, channels=3, device="cpu")
batch = images.normalise(images.train_images[indices])
"""

import argparse
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fire_core.errors import UserError, clean_exit, first_line
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
    if name == "fashion_mnist":
        arrays = _shipped(folder)
    elif folder is None and name in PUBLISHED:
        arrays = download(name, root)
    else:
        arrays = _read(name, Path(folder or root / name), root, image_size, channels or 3)
    count = classes or arrays.classes
    if count > arrays.classes:
        raise UserError(f"data.classes={classes}: {name} has {arrays.classes} classes")

    def prepared(images: Tensor, labels: Tensor, per_class: int | None) -> list[Tensor]:
        chosen = _first_of_each_class(labels, count, per_class)
        pictures = _with_size(_with_channels(images[chosen], channels), image_size, fit)
        return [pictures.contiguous(), labels[chosen]]

    train, test = prepared(*arrays.train, train_per_class), prepared(*arrays.test, test_per_class)
    mean, std = pixel_statistics(train[0])
    parts = [part.to(device) for part in (*train, *test)]
    return Images(name, *parts, count, mean.to(device), std.to(device))


def download(name: str, root: str | Path = "data") -> Arrays:
    """Return a data set of PUBLISHED below `root`, after downloading what is missing; UserError if it cannot be had."""
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
            remedy = f"run again, delete {place} to download it again, or set data.folder=FOLDER to one that has it"
            raise UserError(f"{name} cannot be had ({first_line(error)}): {remedy}") from error
        return _read(name, unpacked, Path(root))


def _shipped(folder: str | Path | None) -> Arrays:
    if folder is not None:
        others = "your own pictures need data=image_folder, all of Fashion-MNIST data=fashion_mnist_full"
        raise UserError(f"data.folder={folder}: fashion_mnist is shipped and reads no folder; {others}")
    with np.load(SHIPPED) as stored:
        parts = {key: torch.from_numpy(array) for key, array in stored.items()}
    train = parts["train_images"].unsqueeze(1), parts["train_labels"].long()
    return Arrays(train, (parts["test_images"].unsqueeze(1), parts["test_labels"].long()), classes=10)


def _read(name: str, folder: Path, root: Path, image_size: int | None = None, channels: int = 3) -> Arrays:
    """Return the data set that a folder holds; `image_size` and `channels` are those of "image_folder"."""
    folder = folder.expanduser()
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist: name the folder of the images with data.folder=FOLDER")
    if name == "tiny_imagenet" and (inner := folder / "tiny-imagenet-200").is_dir():
        folder = inner
    if name in TORCHVISION and not (name in AS_CLASS_FOLDERS and (folder / "train").is_dir()):
        return read_published(name, folder)
    if name == "image_folder":
        return read_class_folders(folder, image_size, channels, root / "decoded")
    classes, size = AS_CLASS_FOLDERS[name]
    arrays = read_class_folders(folder, size, 3, root / "decoded")
    if (found := arrays.classes) != classes:
        raise UserError(f"{folder} has {found} classes in train, {name} has {classes}: use data=image_folder")
    return arrays


def _first_of_each_class(labels: Tensor, classes: int, count: int | None) -> Tensor:
    """Return the sorted positions of the first `count` images (None: all) of each of the first `classes`."""
    chosen = [(labels == label).nonzero().flatten()[:count] for label in range(classes)]
    if (fewest := min(map(len, chosen))) < (count or 0):
        wrong = f"a class has {fewest} images, {count} were asked for"
        raise UserError(f"{wrong}: set data.train_per_class or data.test_per_class lower")
    return torch.cat(chosen).sort().values


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
    """Download published data sets ahead of training; end with code 2 if one could not be had or read."""
    parser = argparse.ArgumentParser(description="Download image data ahead of training.")
    parser.add_argument("names", nargs="+", choices=PUBLISHED, metavar="NAME", help=", ".join(PUBLISHED))
    parser.add_argument("--root", default="data", help="folder of the data (run.data_root)")
    options = parser.parse_args()
    with clean_exit():
        for name in options.names:
            arrays = download(name, options.root)
            train, test = (len(labels) for _, labels in (arrays.train, arrays.test))
            print(f"{name}: {train:,} training and {test:,} test images")


if __name__ == "__main__":
    main()
