"""Fetch data sets before training.

    python -m vision.prepare cifar10 cifar100 tiny_imagenet fashion_mnist_full [--root data]

torchvision downloads what is missing and compares MD5 sums. The files are also unpacked, decoded and checked, so
training starts at once.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run from anywhere

from fire_core.errors import UserError, print_error
from vision.data import PUBLISHED, download


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; exits with code 2 if a data set could not be prepared."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=PUBLISHED, metavar="NAME")
    parser.add_argument("--root", type=Path, default=Path("data"), help="folder for downloads (data)")
    options = parser.parse_args(arguments)
    failed = False
    for name in options.names:
        try:
            arrays = download(name, options.root)
            counts = f"{len(arrays.train_labels):,} training and {len(arrays.test_labels):,} test images"
            print(f"{name}: {counts}, {len(arrays.class_names)} classes", flush=True)
        except UserError as error:
            print_error(f"{name}: {error}")
            failed = True
    sys.exit(2 if failed else 0)


if __name__ == "__main__":
    main()
