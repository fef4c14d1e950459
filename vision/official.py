"""What the authors' vision code does and ours does not by default: one function for each switch of `compat=official`.

Nothing here reads a setting or keeps state: `vision/train.py` and `vision/protocols.py` call these functions where the
switch (`schedule`, `splits`, `batch_norm_start`, `normalisation`) says `official`. DEVIATIONS.md lists them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from vision.images import Images

# Means and standard deviations of the channels, for training images and for test images.
CIFAR10 = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100_TRAIN = (
    (0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
    (0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
)
CIFAR100_TEST = (
    (0.5088964127604166, 0.48739301317401956, 0.44194221124387256),
    (0.2682515741720801, 0.2573637364478126, 0.2770957707973042),
)
TINY_IMAGENET = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
STATISTICS = {
    "cifar10": (CIFAR10, CIFAR10),
    "cifar100": (CIFAR100_TRAIN, CIFAR100_TEST),
    "tiny_imagenet": (TINY_IMAGENET, TINY_IMAGENET),
}


def rate_factor(epoch: int, epochs: int) -> float:
    """Factor on the learning rate in one epoch (from 0) of a phase of `epochs`.

    A linear rise over the first tenth of the phase, then 1. The rise is keyed to the number of epochs logged before,
    modulo 100, and a phase logs 100 times: a phase of 1000 epochs reaches 100 after epoch 990, so its last nine epochs
    run at 0.92, 0.93, ... 0.99 and 0.
    """
    logged = -(-100 * epoch // epochs)  # rounded up
    if logged % 100 >= 10:
        return 1.0
    return min(1.0, (epoch + 1) % 100 / (epochs / 10))


def image_order(images: Images, seed: int) -> np.ndarray:
    """Order in which `warm_start` and `continual` take the training images: (n,) int64."""
    return _orders(images, seed)[0]


def class_order(images: Images, seed: int) -> np.ndarray:
    """Order in which `class_incremental` brings the classes: (classes,) int64."""
    return _orders(images, seed)[1]


def _orders(images: Images, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Permutations of training images and classes; one of the test images, which nothing uses, is drawn between them."""
    stream = np.random.RandomState(seed % 2**32)
    order = stream.permutation(len(images.train_labels))
    stream.permutation(len(images.test_labels))
    return order, stream.permutation(images.classes)


@torch.no_grad()
def pass_zeros(net: nn.Module, channels: int, image_size: int) -> None:
    """Send two black images through a new net in training mode, which moves the running statistics of batch norms."""
    net.train()
    net(torch.zeros(2, channels, image_size, image_size))


def with_statistics(images: Images) -> Images:
    """The same images, normalised with the constants of the authors' code; data sets without any keep their own.

    CIFAR-100's test images are normalised with their own mean and deviation.
    """
    if images.name not in STATISTICS or images.channels != 3:
        return images
    (mean, std), (test_mean, test_std) = STATISTICS[images.name]
    return replace(
        images,
        mean=_like(images, mean),
        std=_like(images, std),
        test_mean=_like(images, test_mean),
        test_std=_like(images, test_std),
    )


def _like(images: Images, values: tuple[float, ...]) -> Tensor:
    return torch.tensor(values, dtype=images.mean.dtype, device=images.mean.device)
