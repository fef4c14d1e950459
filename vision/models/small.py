"""The small networks of the probes: a multilayer perceptron and a convolutional net, with or without LayerNorm."""

import torch
from torch import Tensor, nn


def activation(channels: int, norm: str) -> list[nn.Module]:
    """Return ReLU, after LayerNorm over all values of a sample, (channels, ...), if `norm` is "layer"."""
    return [*([nn.GroupNorm(1, channels)] if norm == "layer" else []), nn.ReLU()]


class MLP(nn.Module):
    """Multilayer perceptron from images (n, channels, size, size) to logits (n, classes).

    It has `depth` hidden layers of `width` units with `activation`.
    """

    def __init__(
        self, classes: int, channels: int, image_size: int, width: int = 256, depth: int = 3, norm: str = ""
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = channels * image_size * image_size
        for _ in range(depth):
            layers += [nn.Linear(inputs, width), *activation(width, norm)]
            inputs = width
        self.hidden = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)
        self.head.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(torch.flatten(x, 1)))


class CNN(nn.Module):
    """Convolutional net from images (n, channels, size, size) to logits (n, classes).

    It has `depth` 3x3 convolutions with `activation`, a 2x2 max-pool after every second one, and one hidden layer of
    4 * `width` units. Channels double after each pool: 32, 32, 64, 64 by default.
    """

    def __init__(
        self, classes: int, channels: int, image_size: int, width: int = 32, depth: int = 4, norm: str = ""
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs, size = channels, image_size
        for index in range(depth):
            outputs = width * 2 ** (index // 2)
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), *activation(outputs, norm)]
            inputs = outputs
            if index % 2 and size > 1:
                layers.append(nn.MaxPool2d(2))
                size //= 2
        self.convolutions = nn.Sequential(*layers)
        self.hidden = nn.Sequential(nn.Linear(inputs * size * size, 4 * width), *activation(4 * width, norm))
        self.head = nn.Linear(4 * width, classes)
        self.head.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(torch.flatten(self.convolutions(x), 1)))
