"""Labelled image data sets: uint8 tensors, normalised on their device."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Images:
    """A labelled image data set, with all tensors on one device.

    train_images, test_images: (n, channels, size, size) uint8. train_labels, test_labels: (n,) int64. classes: number
    of classes. mean, std: (channels,) float32 of the training pixels scaled to [0, 1]. test_mean, test_std: the same
    for the normalisation of test images; None takes mean and std.
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    classes: int
    mean: Tensor
    std: Tensor
    test_mean: Tensor | None = None
    test_std: Tensor | None = None

    @property
    def channels(self) -> int:
        return self.train_images.shape[1]

    @property
    def image_size(self) -> int:
        return self.train_images.shape[-1]

    def normalise(self, pictures: Tensor, *, test: bool = False) -> Tensor:
        """Return uint8 images (n, channels, size, size) as float32, shifted and scaled by mean and std of each channel.

        test: use `test_mean` and `test_std`, if they are given.
        """
        own = test and self.test_mean is not None
        pair = (self.test_mean, self.test_std) if own else (self.mean, self.std)
        mean, std = (value.view(1, -1, 1, 1) for value in pair)
        return pictures.to(torch.float32).sub_(255 * mean).mul_(1 / (255 * std))

    def __str__(self) -> str:
        counts = f"{len(self.train_labels)} training and {len(self.test_labels)} test images"
        return f"{self.name}: {counts}, {self.channels}x{self.image_size}x{self.image_size}, {self.classes} classes"


def pixel_statistics(pictures: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each channel of uint8 images (n, channels, ...) scaled to [0, 1].

    Both are (channels,) float32 on the CPU, from exact counts. A constant channel gets deviation 1, and becomes 0.
    """
    values = torch.arange(256, dtype=torch.float64) / 255
    counts = [torch.bincount(channel.flatten().cpu(), minlength=256) for channel in pictures.transpose(0, 1)]
    share = torch.stack(counts).double() / counts[0].sum()
    mean = (share * values).sum(dim=1)
    deviation = (share * (values - mean[:, None]).square()).sum(dim=1).sqrt()
    return mean.float(), deviation.where(deviation > 0, 1.0).float()
