"""Readers of published data sets and of folders of images. Each returns `Arrays`."""

from __future__ import annotations

import hashlib
import os
import stat
import warnings
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

from fire_core.errors import UserError, first_line, shown
from harness.runs import checkpoint as checkpoints
from harness.runs.folders import FolderLock
from vision.torchvision_import import import_torchvision

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")
# Decoders of these files. Pillow looks at the content of a file, not at its name: without this list, PostScript in a
# .jpg starts Ghostscript.
FORMATS = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
TORCHVISION = {"fashion_mnist_full": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}


class Arrays(NamedTuple):
    """A data set in memory: uint8 images (n, channels, height, width) and int64 labels (n,)."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]


# ------------------------------------------------------------------------------------------- as published
def read_published(name: str, folder: Path, *, download: bool = False) -> Arrays:
    """Return CIFAR-10, CIFAR-100 or Fashion-MNIST below `folder`, read by torchvision.

    torchvision compares CIFAR's files with their published MD5 sums before it reads them. With `download` it first fetches
    and unpacks what is missing or (CIFAR) damaged. Raises UserError if they are unreadable or cannot be fetched.
    """
    data_set = getattr(import_torchvision().datasets, TORCHVISION[name])
    if folder.name == getattr(data_set, "base_folder", None):  # the user named the inner folder
        folder = folder.parent
    try:
        train, test = (data_set(folder, train=part, download=download) for part in (True, False))
    except Exception as error:  # of any type where a file of Fashion-MNIST is damaged
        fails = f"{shown(folder)} does not hold {name} as torchvision unpacks it"
        if download:
            fails = f"{name} cannot be downloaded to {shown(folder)} and read"
        raise UserError(f"{fails} ({first_line(error)})") from error
    arrays = [
        part
        for split in (train, test)
        for part in (_channels_first(np.asarray(split.data)), np.asarray(split.targets, np.int64))
    ]
    return Arrays(*arrays, tuple(train.classes))


def _channels_first(pictures: np.ndarray) -> np.ndarray:
    return pictures[:, None] if pictures.ndim == 3 else pictures.transpose(0, 3, 1, 2)


def read_tiny_imagenet(folder: Path, *, cache: Path) -> Arrays:
    """Return Tiny ImageNet (wnids.txt, train/<id>/images, val); val is the test set.

    The pictures of val are in val/images with val_annotations.txt, as published, or in val/<id>.
    """
    root = tiny_imagenet_root(folder)
    if root is None:
        raise UserError(
            f"{shown(folder)} has no wnids.txt with val beside it: "
            "name the folder of the unpacked tiny-imagenet-200.zip"
        )
    names = tuple(sorted(_read_text(root / "wnids.txt").split()))
    train = [
        (path, i) for i, name in enumerate(names) for path in list_images(root / "train" / name / "images")
    ]
    if any((root / "val" / name).is_dir() for name in names):
        test = [(path, i) for i, name in enumerate(names) for path in list_images(root / "val" / name)]
        return _decode_once([train, test], names, 64, 3, cache, root)
    place = {name: i for i, name in enumerate(names)}
    test = []
    for number, line in enumerate(_read_text(root / "val" / "val_annotations.txt").splitlines(), 1):
        file, _, name = line.partition("\t")
        name = name.split("\t")[0]
        if name not in place:
            raise UserError(
                f"{shown(root)}/val/val_annotations.txt, line {number}: {line[:60]!r} names no class of wnids.txt"
            )
        test.append((os.path.join(root, "val", "images", file), place[name]))
    return _decode_once([train, test], names, 64, 3, cache, root)


def tiny_imagenet_root(folder: Path) -> Path | None:
    """Return the folder with wnids.txt and val of Tiny ImageNet: `folder` or up to two levels below it; None if there is
    none."""
    found = (path.parent for depth in ("", "*/", "*/*/") for path in sorted(folder.glob(f"{depth}wnids.txt")))
    return next((root for root in found if (root / "val").is_dir()), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{shown(path)} cannot be read ({error}): unpack the archive again") from error


# ----------------------------------------------------------------------------------- folders of class folders
def read_class_folders(folder: Path, *, image_size: int | None, channels: int, cache: Path) -> Arrays:
    """Return the images of `folder`/{train,test}/<class>/ (`val` or `valid` replace a missing test folder).

    Classes and files are in the order of torchvision's ImageFolder. Images are converted to `channels` (1 or 3), scaled
    so that the shorter side is `image_size` (None: that of the first image) and cropped to a square in the middle.
    Raises UserError for missing folders, unreadable images, and a test class that train does not have.
    """
    train, test = folder / "train", test_folder(folder)
    if not train.is_dir() or test is None:
        raise UserError(f"{shown(folder)} must hold train/<class>/ and test/<class>/ folders of images")
    names = class_folders(train)
    unknown = sorted(set(class_folders(test)) - set(names))
    if not names:
        raise UserError(f"{shown(train)} has no class folders")
    if unknown:
        raise UserError(f"{shown(test)} has class {shown(unknown[0])!r}, which {shown(train)} lacks")
    listings = [
        [(path, i) for i, name in enumerate(names) for path in list_images(split / name)]
        for split in (train, test)
    ]
    return _decode_once(listings, names, image_size, channels, cache, folder)


def test_folder(folder: Path) -> Path | None:
    """Return the folder of test images in `folder` (test, val or valid), None if there is none."""
    return next((folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()), None)


def class_folders(split: Path) -> tuple[str, ...]:
    """Return the names of the class folders of one split, sorted."""
    return tuple(sorted(entry.name for entry in os.scandir(split) if entry.is_dir()))


def list_images(folder: Path) -> list[str]:
    """Return the paths of image files below `folder`, sorted folder by folder. Links are followed."""
    return [
        os.path.join(parent, name)
        for parent, _, names in sorted(os.walk(folder, followlinks=True))
        for name in sorted(names)
        if name.lower().endswith(SUFFIXES)
    ]


def _decode_once(
    listings: list[list[tuple[str, int]]],
    names: tuple[str, ...],
    image_size: int | None,
    channels: int,
    cache: Path,
    root: Path,
) -> Arrays:
    """Return the images of both splits, decoded once and then read from `cache`.

    The name of the file in `cache` is a hash of the images' paths below `root`, sizes and times, of the arguments, and of
    the version of the decoding (2: pictures of 16 bits are scaled). A damaged file is replaced.
    """
    for split, rows in zip(("training", "test"), listings, strict=True):
        if not rows:
            raise UserError(f"{shown(root)} holds no {split} images ({', '.join(SUFFIXES)})")
    digest = hashlib.sha256(f"2 {image_size} {channels} {len(names)}".encode())
    for path, label in (row for rows in listings for row in rows):
        digest.update(os.fsencode(path[len(str(root)) :]) + _facts(path, label))
    name = digest.hexdigest()[:24]
    with FolderLock(cache):  # runs of a sweep may ask for the same pictures at the same time
        parts = _stored(cache / f"{name}.pt")
        if parts is None:
            parts = _decode_all(listings, image_size, channels)
            checkpoints.save(cache, 0, {"parts": parts}, name=name)
    return Arrays(*(part.numpy() for part in parts), names)


def _facts(path: str, label: int) -> bytes:
    """Return label, size and time of an image. Raises UserError if the path is not a regular file, such as a pipe."""
    try:
        facts = os.stat(path)
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be read ({error.strerror}): remove or restore it") from error
    if not stat.S_ISREG(facts.st_mode):
        raise UserError(f"{shown(path)} is not a regular file: remove or replace it")
    return f"|{label}|{facts.st_size}|{facts.st_mtime_ns}\n".encode()


def _stored(path: Path) -> list[torch.Tensor] | None:
    """Return the four tensors of a decoded copy, None if it is missing or damaged."""
    if path.is_file():
        try:
            return checkpoints.load(path)["parts"]
        except UserError:
            print(f"note: {path} is damaged; the pictures are decoded again", flush=True)
    return None


def _decode_all(
    listings: list[list[tuple[str, int]]], image_size: int | None, channels: int
) -> list[torch.Tensor]:
    if image_size is None:
        image_size = min(_open(listings[0][0][0], channels).size)
    parts = []
    with tqdm(total=sum(map(len, listings)), desc="decoding", unit="image", disable=None) as bar:
        for rows in listings:
            pictures = np.empty((len(rows), channels, image_size, image_size), np.uint8)
            for i, (path, _) in enumerate(rows):
                pictures[i] = _decode(path, image_size, channels)
                bar.update()
            labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
            parts += [torch.from_numpy(pictures), labels]
    return parts


def _decode(path: str, size: int, channels: int) -> np.ndarray:
    picture = _open(path, channels)
    width, height = picture.size
    if (width, height) != (size, size):
        shorter = min(width, height)
        left, top = (width - shorter) // 2, (height - shorter) // 2
        box = (left, top, left + shorter, top + shorter)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    array = np.asarray(picture)
    return array.transpose(2, 0, 1) if channels == 3 else array[None]


def _open(path: str, channels: int) -> Image.Image:
    """Return an image in grey or colour. Raises UserError if it cannot be decoded or is so large that it may be a bomb."""
    try:
        with (
            warnings.catch_warnings(action="error", category=Image.DecompressionBombWarning),
            Image.open(path, formats=FORMATS) as image,
        ):
            if image.mode in ("I", "F"):
                raise ValueError("it has 32 bits a pixel, which has no fixed range: convert it to 8 or 16")
            if image.mode.startswith("I;16"):  # `convert` would cut off above 255
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            return image.convert("RGB" if channels == 3 else "L")
    except Exception as error:  # Pillow's decoders raise many types
        raise UserError(
            f"{shown(path)} cannot be decoded ({first_line(error)}): remove it, or replace it by one of {', '.join(FORMATS)}"
        ) from error
