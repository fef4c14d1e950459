"""Data sets in the forms they are published in, read into arrays without running anything they contain.

Every reader returns `Arrays`: uint8 pictures (n, channels, height, width) and int64 labels.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import pickle
import shutil
import tarfile
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from fire_core.errors import UserError

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".gif")


def _plain_bytes(text: str, encoding: str) -> bytes:
    """Stands for `_codecs.encode`, by which Python 3 stores bytes in old pickles."""
    if encoding != "latin1":
        raise UserError(f"the batch file asks for the codec {encoding!r}: it is no CIFAR batch, not read")
    return text.encode("latin1")


# The only names a CIFAR batch needs: they rebuild a numpy array from bytes and can do nothing else.
ARRAY_PARTS = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy._core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _plain_bytes,
}


class Arrays(NamedTuple):
    """One data set in memory, as published."""

    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    class_names: tuple[str, ...]


def read_idx(path: Path) -> np.ndarray:
    """One IDX file of bytes (MNIST's format), gzipped or not, in the shape its header says."""
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(raw) < 4 or raw[:3] != b"\x00\x00\x08":
        raise UserError(f"{path} is no IDX file of bytes: download it again")
    dimensions = raw[3]
    shape = np.frombuffer(raw, ">u4", dimensions, offset=4)
    data = np.frombuffer(raw, np.uint8, offset=4 + 4 * dimensions)
    if data.size != shape.prod():
        raise UserError(
            f"{path} is cut short: its header says {tuple(shape.tolist())}, it holds {data.size} bytes"
        )
    return data.reshape(shape)


def read_fashion_mnist(folder: Path, class_names: tuple[str, ...]) -> Arrays:
    """The four IDX files, gzipped or not, anywhere below `folder`."""
    parts = []
    for stem in (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    ):
        found = sorted(folder.rglob(f"{stem}*"))
        if not found:
            raise UserError(f"{folder} has no file {stem}[.gz]: name the folder with the four IDX files")
        parts.append(read_idx(found[0]))
    return Arrays(
        parts[0][:, None],
        parts[1].astype(np.int64),
        parts[2][:, None],
        parts[3].astype(np.int64),
        class_names,
    )


class _ArrayUnpickler(pickle.Unpickler):
    """Unpickles containers, bytes, numbers and numpy arrays; refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in ARRAY_PARTS:
            return ARRAY_PARTS[(module, name)]
        raise UserError(f"the batch file wants to load {module}.{name}: it is no CIFAR batch, not read")


def read_batch(path: Path) -> dict[bytes, Any]:
    """One pickled CIFAR batch. Anything but plain values and numpy arrays in it raises `UserError`."""
    with path.open("rb") as file:
        try:
            return _ArrayUnpickler(file, encoding="bytes").load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(f"{path} is no CIFAR batch ({error}): download it again") from error


def read_cifar(folder: Path, classes: int) -> Arrays:
    """CIFAR-10 or CIFAR-100 below `folder`: the Python batches or the binary version."""
    ten = classes == 10
    python_names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"] if ten else ["train", "test"]
    binary_names = [f"{name}.bin" for name in python_names]
    for names, read in ((python_names, _python_part), (binary_names, _binary_part)):
        places = [_find(folder, name) for name in names]
        if all(places):
            parts = [read(place, ten) for place in places if place]
            images = np.concatenate([part[0] for part in parts[:-1]])
            labels = np.concatenate([part[1] for part in parts[:-1]])
            return Arrays(images, labels, *parts[-1], _cifar_names(folder, ten))
    raise UserError(
        f"{folder} holds neither {python_names[0]} ... nor {binary_names[0]} ...: "
        f"name the folder with the unpacked CIFAR-{classes} files"
    )


def _python_part(path: Path, ten: bool) -> tuple[np.ndarray, np.ndarray]:
    batch = read_batch(path)
    labels = batch[b"labels" if ten else b"fine_labels"]
    return np.asarray(batch[b"data"], np.uint8).reshape(-1, 3, 32, 32), np.asarray(labels, np.int64)


def _binary_part(path: Path, ten: bool) -> tuple[np.ndarray, np.ndarray]:
    label_bytes = 1 if ten else 2  # CIFAR-100: coarse, then fine
    rows = np.fromfile(path, np.uint8)
    if rows.size % (3072 + label_bytes):
        raise UserError(f"{path} is cut short ({rows.size} bytes): download it again")
    rows = rows.reshape(-1, 3072 + label_bytes)
    return rows[:, label_bytes:].reshape(-1, 3, 32, 32), rows[:, label_bytes - 1].astype(np.int64)


def _cifar_names(folder: Path, ten: bool) -> tuple[str, ...]:
    pickled = _find(folder, "batches.meta" if ten else "meta")
    if pickled:
        return tuple(n.decode() for n in read_batch(pickled)[b"label_names" if ten else b"fine_label_names"])
    plain = _find(folder, "batches.meta.txt" if ten else "fine_label_names.txt")
    if plain:
        return tuple(plain.read_text().split())
    return tuple(map(str, range(10 if ten else 100)))


def _find(folder: Path, name: str) -> Path | None:
    return next((path for path in sorted(folder.rglob(name)) if path.is_file()), None)


def read_image_folder(folder: Path, *, image_size: int | None, channels: int, cache: Path) -> Arrays:
    """`folder`/{train,test}/<class>/* (`val` or `valid` serve as test), any image size, every class in train.

    Images are turned to `channels` (1 or 3), scaled so that the shorter side is `image_size` (None: that of the first
    image) and cut to a square around the middle. The result is kept in `cache` under a hash of the files' names, sizes
    and times.
    """
    train = folder / "train"
    test = next((folder / name for name in ("test", "val", "valid") if (folder / name).is_dir()), None)
    if not train.is_dir() or test is None:
        raise UserError(f"{folder} must hold train/<class>/ and test/<class>/ folders of images")
    names = tuple(sorted(entry.name for entry in os.scandir(train) if entry.is_dir()))
    unknown = sorted(e.name for e in os.scandir(test) if e.is_dir() and e.name not in names)
    if not names or unknown:
        raise UserError(
            f"{test} has class {unknown[0]!r}, which {train} lacks"
            if unknown
            else f"{train} has no class folders"
        )
    listings = [_list_classes(split, names) for split in (train, test)]
    return _decode_splits(listings, names, image_size, channels, cache)


def read_tiny_imagenet(folder: Path, *, cache: Path) -> Arrays:
    """Tiny ImageNet as published (wnids.txt, train/<id>/images, val/val_annotations.txt); validation is the test set."""
    ids = _find(folder, "wnids.txt")
    if ids is None:
        raise UserError(f"{folder} has no wnids.txt: name the folder of the unpacked tiny-imagenet-200.zip")
    root = ids.parent
    names = tuple(sorted(ids.read_text().split()))
    train = [(p, i) for i, name in enumerate(names) for p in _images_in(root / "train" / name / "images")]
    rows = [line.split("\t") for line in (root / "val" / "val_annotations.txt").read_text().splitlines()]
    place = {name: i for i, name in enumerate(names)}
    test = [(root / "val" / "images" / row[0], place[row[1]]) for row in rows if len(row) > 1]
    return _decode_splits([train, test], names, 64, 3, cache)


def unpack(archive: Path, folder: Path) -> Path:
    """Extract a .zip or .tar.gz into `folder`, complete or not at all."""
    if folder.is_dir():
        return folder
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            file.extractall(partial)
    else:
        with tarfile.open(archive) as file:
            file.extractall(partial, filter="data")
    os.replace(partial, folder)
    return folder


def _list_classes(split: Path, names: tuple[str, ...]) -> list[tuple[Path, int]]:
    files = [(path, i) for i, name in enumerate(names) for path in _images_in(split / name)]
    if not files:
        raise UserError(f"{split} holds no images ({', '.join(SUFFIXES)})")
    return files


def _images_in(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in SUFFIXES)


def _decode_splits(
    listings: list[list[tuple[Path, int]]],
    names: tuple[str, ...],
    image_size: int | None,
    channels: int,
    cache: Path,
) -> Arrays:
    digest = hashlib.sha256(f"{image_size} {channels} {names}".encode())
    for path, label in (row for rows in listings for row in rows):
        facts = path.stat()
        digest.update(f"{path}|{label}|{facts.st_size}|{facts.st_mtime_ns}\n".encode())
    stored = cache / f"{digest.hexdigest()[:24]}.pt"
    if stored.exists():
        parts = torch.load(stored, weights_only=True)
    else:
        parts = _decode_all(listings, image_size, channels)
        cache.mkdir(parents=True, exist_ok=True)
        partial = stored.with_suffix(f".{os.getpid()}")
        torch.save(parts, partial)
        os.replace(partial, stored)
    return Arrays(*(part.numpy() for part in parts), names)


def _decode_all(
    listings: list[list[tuple[Path, int]]], image_size: int | None, channels: int
) -> list[torch.Tensor]:
    if image_size is None:
        with _open(listings[0][0][0]) as first:
            image_size = min(first.size)
    parts = []
    for rows in listings:
        pictures = np.empty((len(rows), channels, image_size, image_size), np.uint8)
        for i, (path, _) in enumerate(rows):
            pictures[i] = _decode(path, image_size, channels)
        labels = torch.tensor([label for _, label in rows], dtype=torch.int64)
        parts += [torch.from_numpy(pictures), labels]
    return parts


def _decode(path: Path, size: int, channels: int) -> np.ndarray:
    with _open(path) as image:
        try:
            picture = image.convert("RGB" if channels == 3 else "L")
        except OSError as error:
            raise UserError(f"{path} cannot be decoded ({error}): remove or replace it") from error
    width, height = picture.size
    if (width, height) != (size, size):
        shorter = min(width, height)
        left, top = (width - shorter) // 2, (height - shorter) // 2
        box = (left, top, left + shorter, top + shorter)
        picture = picture.resize((size, size), Image.Resampling.BILINEAR, box=box)
    array = np.asarray(picture)
    return array.transpose(2, 0, 1) if channels == 3 else array[None]


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except (UnidentifiedImageError, OSError) as error:
        raise UserError(f"{path} is no readable image: remove or replace it") from error
