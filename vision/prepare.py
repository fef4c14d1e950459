"""Download data sets ahead of training, and check that they can be read.

python -m vision.prepare cifar10 cifar100 tiny_imagenet fashion_mnist_full [--root data]
"""

import argparse
import sys

from fire_core.errors import UserError, print_error
from vision.data import PUBLISHED, download


def main() -> None:
    """Run the command line; exits with code 2 if a data set could not be had."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=PUBLISHED, metavar="NAME")
    parser.add_argument("--root", default="data", help="folder for downloads (data)")
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
