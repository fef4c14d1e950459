"""The behaviour of the authors' vision code where ours differs by default: the switches of `compat=official`.

The functions read no settings and keep no state. They are called if their switch (`schedule`, `splits`, `batch_norm_start`,
`normalisation`) is `official`. docs/DEVIATIONS.md lists the switches.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import nn

from vision.images import Images

STATISTICS = {  # Mean and deviation of the channels of training images, then those of test images.
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)) * 2,
    "cifar100": (
        (0.5070751592371323, 0.48654887331495095, 0.4409178433670343),
        (0.2673342858792401, 0.2564384629170883, 0.27615047132568404),
        (0.5088964127604166, 0.48739301317401956, 0.44194221124387256),
        (0.2682515741720801, 0.2573637364478126, 0.2770957707973042),
    ),
    "tiny_imagenet": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)) * 2,
}


def rate_factor(epoch: int, epochs: int) -> float:
    """Return the factor on the learning rate in one epoch (from 0) of a phase of `epochs`.

    It rises linearly over the first tenth of the phase and then is 1. The official code logs 100 times per phase, and
    the rise lasts while the number of logs, modulo 100, is below 10. In a phase of 1000 epochs that number is 100 after
    epoch 990, so the last nine epochs run at 0.92, 0.93, ... 0.99 and 0.
    """
    logged = -(-100 * epoch // epochs)  # rounded up
    if logged % 100 >= 10:
        return 1.0
    return min(1.0, (epoch + 1) % 100 / (epochs / 10))


def orders(images: Images, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of the training images, (n,) int64, for `warm_start` and `continual`, and that of the classes,
    (classes,) int64, for `class_incremental`. An order of the test images is drawn between the two and not used."""
    stream = np.random.RandomState(seed % 2**32)
    order = stream.permutation(len(images.train_labels))
    stream.permutation(len(images.test_labels))
    return order, stream.permutation(images.classes)


@torch.no_grad()
def pass_zeros(net: nn.Module, channels: int, image_size: int) -> None:
    """Pass two images of zeros through a new net in training mode, which updates the statistics of batch norm."""
    net.train()
    net(torch.zeros(2, channels, image_size, image_size))


def with_statistics(images: Images) -> Images:
    """Return the data set with the mean and deviation of the authors' code; data sets not in STATISTICS keep theirs.

    CIFAR-100's test images have a mean and deviation of their own. Grey images keep theirs.
    """
    if images.name not in STATISTICS or images.channels != 3:
        return images
    mean, std, test_mean, test_std = map(images.mean.new_tensor, STATISTICS[images.name])
    return replace(images, mean=mean, std=std, test_mean=test_mean, test_std=test_std)
