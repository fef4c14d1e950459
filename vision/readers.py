"""Readers of published data sets and of folders of images. Each returns `Arrays`."""

import os
import warnings
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from tqdm import tqdm

from fire_core.errors import UserError, first_line, shown
from harness.runs import checkpoint as checkpoints
from harness.runs.folders import FolderLock, fingerprint
from vision.torchvision_import import import_torchvision

TORCHVISION = {"fashion_mnist_full": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
# Pillow looks at the content of a file, not at its name: without this list, PostScript in a .jpg starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF")


class Arrays(NamedTuple):
    """A data set as it was read: of both splits, uint8 images (n, channels, height, width) and int64 labels (n,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int


def read_published(name: str, folder: Path, *, download: bool = False) -> Arrays:
    """Return CIFAR-10, CIFAR-100 or Fashion-MNIST below `folder`, read by torchvision, which knows CIFAR's MD5 sums.

    download: first fetch and unpack what is missing. Raises UserError if the files cannot be had or read.
    """
    data_set = getattr(import_torchvision().datasets, TORCHVISION[name])
    try:
        train, test = (data_set(folder, train=part, download=download) for part in (True, False))
    except Exception as error:  # of any type where a file of Fashion-MNIST is damaged
        wrong = f"{shown(folder)} does not hold {name} as torchvision unpacks it"
        raise UserError(f"{wrong} ({first_line(error)})") from error
    splits = []
    for split in (train, test):
        pictures = torch.as_tensor(split.data)  # CIFAR's have their colours last
        pictures = pictures.unsqueeze(1) if pictures.ndim == 3 else pictures.movedim(3, 1)
        splits.append((pictures, torch.as_tensor(split.targets)))
    return Arrays(*splits, len(train.classes))


def read_class_folders(folder: Path, image_size: int | None, channels: int, cache: Path) -> Arrays:
    """Return the images of `folder`/{train,test}/<class>/, in the order of torchvision's ImageFolder.

    The test folder may be called `val` or `valid`, and may be that of Tiny ImageNet, whose labels are in a file. Images are
    converted to `channels` (1 or 3), scaled so that the shorter side is `image_size` (None: that of the first image) and
    cropped to a square in the middle. They are decoded once, and then read from `cache`, where their copy has the name of
    the images' paths below `folder`, sizes and times. Raises UserError for missing folders and unreadable images.
    """
    try:
        train = import_torchvision().datasets.ImageFolder(folder / "train")
        listings = [train.samples, _test_samples(folder, train.class_to_idx)]
        files = [
            (path[len(str(folder)) :], label, (facts := os.stat(path)).st_size, facts.st_mtime_ns)
            for path, label in chain(*listings)
        ]
    except (OSError, KeyError) as error:
        wrong = f"{shown(folder)} must hold train/<class>/ and test/<class>/ folders of images"
        raise UserError(f"{wrong} ({first_line(error)})") from error
    name = fingerprint([files, image_size, channels], 24)
    with FolderLock(cache):  # runs of a sweep may ask for the same pictures at the same time
        if not (path := cache / f"{name}.pt").is_file():
            parts = _decode_all(listings, image_size, channels)
            checkpoints.save(cache, 0, {"parts": parts}, name=name)
        parts = checkpoints.load(path, remedy="delete it, and the pictures are decoded again")["parts"]
    return Arrays(tuple(parts[:2]), tuple(parts[2:]), len(train.classes))


def _test_samples(folder: Path, numbers: dict[str, int]) -> list[tuple[str, int]]:
    """Return (path, number of the class) of each test image."""
    pictures, annotations = folder / "val" / "images", folder / "val" / "val_annotations.txt"
    if pictures.is_dir() and annotations.is_file():  # Tiny ImageNet as published
        rows = (line.split("\t") for line in annotations.read_text().splitlines())
        return [(str(pictures / file), numbers[label]) for file, label, *_ in rows]
    for part in (folder / "test", folder / "val", folder / "valid"):
        if part.is_dir() and {path.name for path in part.iterdir() if path.is_dir()} == numbers.keys():
            return import_torchvision().datasets.ImageFolder(part).samples
    raise FileNotFoundError("no folder test, val or valid has the classes of train")


def _decode_all(listings: list[list[tuple[str, int]]], image_size: int | None, channels: int) -> list[Tensor]:
    """Return training images, their labels, test images and their labels."""
    side = image_size or min(_open(listings[0][0][0], channels).size)
    parts = []
    with tqdm(total=sum(map(len, listings)), desc="decoding", unit="image", disable=None) as bar:
        for listing in listings:
            pictures = torch.empty(len(listing), channels, side, side, dtype=torch.uint8)
            for place, (path, _) in zip(pictures, listing, strict=True):
                square = ImageOps.fit(_open(path, channels), (side, side), Image.Resampling.BILINEAR)
                place.copy_(torch.from_numpy(np.array(square)).view(side, side, channels).permute(2, 0, 1))
                bar.update()
            parts += [pictures, torch.tensor([label for _, label in listing])]
    return parts


def _open(path: str, channels: int) -> Image.Image:
    """Return an image in grey or colour. Raises UserError if it cannot be decoded or is so large that it may be a bomb."""
    try:
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(path, formats=FORMATS) as image,
        ):
            if image.mode.startswith(("I", "F")):  # `convert` would cut off above 255
                raise ValueError("it has more than 8 bits a channel")
            return image.convert("RGB" if channels == 3 else "L")
    except Exception as error:  # Pillow's decoders raise many types
        remedy = f"remove it, or replace it by a {', '.join(FORMATS)} of 8 bits a channel"
        raise UserError(f"{shown(path)} cannot be decoded ({first_line(error)}): {remedy}") from error
