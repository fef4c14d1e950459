"""Fetch data sets before training, or make the shipped Fashion-MNIST subset again.

    python vision/prepare.py cifar10 cifar100 tiny_imagenet fashion_mnist_full [--root data]
    python vision/prepare.py fashion_mnist --folder FOLDER_WITH_THE_FOUR_IDX_FILES

The second form writes vision/assets/fashion_mnist_subset.npz: of every class the first 1,000 of the 60,000 training
images and the first 200 of the 10,000 test images, in the order of the original files. (Debian's package
dataset-fashion-mnist holds those files: `apt-get download dataset-fashion-mnist`, `dpkg-deb -x PACKAGE FOLDER`.)
"""

import argparse
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fire_core.errors import UserError
from vision.data import ASSETS, FASHION_CLASSES, SOURCES, _first_of_each_class, download
from vision.readers import read_fashion_mnist

TRAIN_PER_CLASS, TEST_PER_CLASS = 1000, 200


def write_subset(folder: Path, path: Path) -> None:
    """The shipped subset as a reproducible .npz: LZMA inside, no time stamps."""
    full = read_fashion_mnist(folder, FASHION_CLASSES)
    train = _first_of_each_class(full.train_labels, TRAIN_PER_CLASS)
    test = _first_of_each_class(full.test_labels, TEST_PER_CLASS)
    arrays = {
        "train_images": full.train_images[train, 0],
        "train_labels": full.train_labels[train].astype(np.uint8),
        "test_images": full.test_images[test, 0],
        "test_labels": full.test_labels[test].astype(np.uint8),
    }
    with zipfile.ZipFile(path, "w", zipfile.ZIP_LZMA) as file:
        for key, array in arrays.items():
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, np.ascontiguousarray(array), allow_pickle=False)
            file.writestr(zipfile.ZipInfo(f"{key}.npy"), buffer.getvalue(), zipfile.ZIP_LZMA)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=["fashion_mnist", *SOURCES])
    parser.add_argument("--root", default="data", help="folder for downloads")
    parser.add_argument("--folder", type=Path, help="the original Fashion-MNIST files, for fashion_mnist")
    arguments = parser.parse_args()
    try:
        for name in arguments.names:
            if name != "fashion_mnist":
                print(f"{name}: {download(name, arguments.root)}")
            elif arguments.folder is None:
                raise UserError("fashion_mnist ships with the code; to make it again add --folder FOLDER")
            else:
                write_subset(arguments.folder, ASSETS / "fashion_mnist_subset.npz")
                print(f"wrote {ASSETS / 'fashion_mnist_subset.npz'}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
