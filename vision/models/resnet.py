"""ResNet-18 with a stem for small images (3x3, stride 1, no pooling) and a two-layer head."""

from torch import Tensor, nn


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm; a 1x1 convolution on the shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or inputs != outputs:
            scale = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(scale, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return self.relu2(self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x))))) + self.shortcut(x))


class ResNet(nn.Module):
    """Residual network from images (n, channels, height, width) to logits (n, classes).

    `width` 64 and `depth` 2 (blocks in each of the four stages) give the paper's ResNet-18, as the official code builds
    it: global average pool, then Linear 512-512, ReLU, Linear 512-classes.
    """

    def __init__(
        self, *, classes: int, channels: int, image_size: int, width: int = 64, depth: int = 2
    ) -> None:
        super().__init__()
        del image_size  # any size works: the head comes after a global average
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        stages, inputs = [], width
        for stage in range(4):
            outputs, stride = width * 2**stage, 1 if stage == 0 else 2
            blocks = [ResidualBlock(inputs, outputs, stride)]
            blocks += [ResidualBlock(outputs, outputs, 1) for _ in range(depth - 1)]
            stages.append(nn.Sequential(*blocks))
            inputs = outputs
        self.layer1, self.layer2, self.layer3, self.layer4 = stages
        self.hidden = nn.Linear(inputs, inputs)
        self.relu2 = nn.ReLU()
        self.head = nn.Linear(inputs, classes)
        self.head.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.head(self.relu2(self.hidden(x.mean(dim=(2, 3)))))
