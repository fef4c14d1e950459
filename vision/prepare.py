"""Fetch data sets before training, or rebuild the Fashion-MNIST subset that ships with the code.

    python -m vision.prepare cifar10 cifar100 tiny_imagenet fashion_mnist_full [--root data]
    python -m vision.prepare fashion_mnist

The same command resumes a stopped download. It also unpacks, decodes and checks the files, so training starts at once.

The second form writes vision/assets/fashion_mnist_subset.npz from fashion_mnist_full: the first 1,000 training images
and the first 200 test images of every class, in the order of the original files.
"""

import argparse
import io
import sys
import zipfile
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from fire_core.errors import UserError, print_error
from vision.data import ASSETS, SOURCES, download, first_of_each_class
from vision.readers import Arrays

TRAIN_PER_CLASS, TEST_PER_CLASS = 1000, 200


def write_subset(full: Arrays, path: Path) -> None:
    """Write the shipped subset as a reproducible .npz file, compressed with LZMA and without time stamps."""
    train = first_of_each_class(full.train_labels, TRAIN_PER_CLASS)
    test = first_of_each_class(full.test_labels, TEST_PER_CLASS)
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


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with code 2 if a data set could not be prepared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=["fashion_mnist", *SOURCES], metavar="NAME")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder for downloads (data)")
    options = parser.parse_args(arguments)
    failed = False
    for name in options.names:
        try:
            arrays = download("fashion_mnist_full" if name == "fashion_mnist" else name, options.root)
            if name == "fashion_mnist":
                write_subset(arrays, ASSETS / "fashion_mnist_subset.npz")
            counts = f"{len(arrays.train_labels):,} training and {len(arrays.test_labels):,} test images"
            print(f"{name}: {counts}, {len(arrays.class_names)} classes", flush=True)
        except UserError as error:
            print_error(f"{name}: {error}")
            failed = True
    sys.exit(2 if failed else 0)


if __name__ == "__main__":
    main()
