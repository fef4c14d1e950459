"""VGG with batch norm and a head of two hidden layers, without dropout."""

import torch
from torch import Tensor, nn

from fire_core.errors import UserError

# Convolutions in each of the five stages; a 2x2 max-pool ends every stage.
STAGES = {11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3)}


class VGG(nn.Module):
    """VGG from images (n, channels, size, size) to logits (n, classes), for depth 11, 13 or 16 and 32 pixels or more.

    `width` 64 and `depth` 16 give the paper's VGG-16-BN: 13 convolutions with bias and batch norm. Images of 64x64
    pixels give 2048 features, and the head is 2048-1024-1024-classes with ReLU. The head scales with `width`.
    """

    def __init__(
        self, *, classes: int, channels: int, image_size: int, width: int = 64, depth: int = 16
    ) -> None:
        super().__init__()
        if depth not in STAGES:
            raise UserError(f"model.depth={depth} does not exist for VGG: use one of {sorted(STAGES)}")
        if image_size < 32:
            raise UserError(f"vgg16 needs 32 pixels or more, not {image_size}: set data.image_size=32")
        layers: list[nn.Module] = []
        inputs = channels
        for factor, convolutions in zip((1, 2, 4, 8, 8), STAGES[depth], strict=True):
            outputs = factor * width
            for _ in range(convolutions):
                layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
                inputs = outputs
            layers.append(nn.MaxPool2d(2))
        self.convolutions = nn.Sequential(*layers)
        features, wide = inputs * (image_size // 32) ** 2, 16 * width
        self.hidden = nn.Sequential(nn.Linear(features, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU())
        self.head = nn.Linear(wide, classes)
        self.head.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(torch.flatten(self.convolutions(x), 1)))
