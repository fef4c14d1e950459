"""ViT-Tiny for small images, with separate query, key and value layers."""

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from fire_core.errors import UserError


def flatten_patches(images: Tensor, size: int) -> Tensor:
    """Return images (n, channels, height, width) as patches (n, patches, size * size * channels).

    Patches and pixels are in row-major order; the channel varies fastest.
    """
    # (n, channels, rows, size, columns, size)
    grid = images.unflatten(3, (-1, size)).unflatten(2, (-1, size))
    return grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention over (n, tokens, width); to_q, to_k and to_v have no bias."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(width, width, bias=False)
        self.to_v = nn.Linear(width, width, bias=False)
        self.to_out = nn.Linear(width, width)

    def forward(self, x: Tensor, queries: Tensor) -> Tensor:
        """Return the output of attention for the tokens `queries` (n, count, width) of `x`."""
        query, key, value = (
            layer(tokens).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, tokens in ((self.to_q, queries), (self.to_k, x), (self.to_v, x))
        )
        mixed = functional.scaled_dot_product_attention(query, key, value)
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Pre-norm transformer block without dropout."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        fc1, fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, activation=nn.GELU(), fc2=fc2))

    def forward(self, x: Tensor, count: int | None) -> Tensor:
        """Return the first `count` tokens after this block, (n, count, width); all for None."""
        normed = self.norm1(x)
        x = x[:, :count] + self.attention(normed, normed[:, :count])
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """Vision transformer from images (n, channels, size, size) to logits (n, classes), read from the class token.

    The defaults are the paper's ViT-Tiny. A patch is flattened, normalised, embedded by one Linear and normalised again.
    Positions and class token are drawn from a standard normal. The last block computes only the class token, because nothing
    reads the others; with `all_tokens` it computes them all, for methods that watch units, and the logits are the same.
    """

    all_tokens = False

    def __init__(
        self,
        *,
        classes: int,
        channels: int = 3,
        image_size: int = 32,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        patch: int = 4,
    ) -> None:
        super().__init__()
        if image_size % patch:
            raise UserError(f"image size {image_size} is not a multiple of model.patch={patch}")
        if width % heads:
            raise UserError(f"model.width={width} is not a multiple of model.heads={heads}")
        self.patch = patch
        self.patch_norm = nn.LayerNorm(channels * patch * patch)
        self.patch_embedding = nn.Linear(channels * patch * patch, width)
        self.embedding_norm = nn.LayerNorm(width)
        self.positions = nn.Parameter(torch.randn(1, (image_size // patch) ** 2 + 1, width))
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.head.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embedding_norm(self.patch_embedding(self.patch_norm(flatten_patches(x, self.patch))))
        tokens = torch.cat((self.class_token.expand(len(x), -1, -1), tokens), dim=1) + self.positions
        for number, block in enumerate(self.blocks, 1):
            tokens = block(tokens, 1 if number == len(self.blocks) and not self.all_tokens else None)
        return self.head(self.norm(tokens[:, 0]))
