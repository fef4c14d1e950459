"""The DQN network: convolutions, one hidden layer, one value per action."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fire_core.errors import UserError


class ActionValues(nn.Linear):
    """The last layer, in the precision of its weights under autocast: in bfloat16 a value of 9 has a resolution of 1/16."""

    is_head = True

    def forward(self, features: Tensor) -> Tensor:
        with torch.autocast(features.device.type, enabled=False):
            return super().forward(features.to(self.weight.dtype))


class DQN(nn.Module):
    """Action values of image stacks (Mnih et al. 2015). All weights are Xavier-uniform, biases zero.

    frame_shape: (height, width). convolutions: (channels, kernel, stride) of each, all followed by a ReLU. hidden: width
    of the hidden layer. `encoder` is the convolutional part and `head` the rest, for
    methods that replace the head. Raises UserError if the frames are too small for the convolutions.
    """

    def __init__(
        self,
        actions: int,
        frame_shape: tuple[int, int] = (84, 84),
        convolutions: Sequence[tuple[int, int, int]] = ((32, 8, 4), (64, 4, 2), (64, 3, 1)),
        hidden: int = 512,
    ):
        super().__init__()
        layers: list[nn.Module] = []
        channels, height, width = 4, *frame_shape
        for out_channels, kernel, stride in convolutions:
            layers += [nn.Conv2d(channels, out_channels, kernel, stride), nn.ReLU()]
            height, width = (height - kernel) // stride + 1, (width - kernel) // stride + 1
            channels = out_channels
        if min(height, width) < 1:
            size = min(frame_shape)
            raise UserError(f"env.frame_size={size} is too small for network.convolutions={convolutions}")
        self.encoder = nn.Sequential(*layers, nn.Flatten())
        features = nn.Linear(channels * height * width, hidden)
        self.head = nn.Sequential(features, nn.ReLU(), ActionValues(hidden, actions))
        for module in self.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, observations: Tensor) -> Tensor:
        """Return action values (B, actions) of stacks (B, 4, height, width), uint8 or float from 0 to 255."""
        return self.head(self.encoder(observations.to(next(self.parameters()).dtype) / 255.0))
