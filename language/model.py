"""A GPT-2 style decoder: the paper's model, smaller ones, and options to vary its architecture.

Module names are those of GPT-2 (`wte`, `wpe`, `h.3.attn.c_attn`, `lm_head`, ...).
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fire_core.errors import UserError

INITIAL_STD = 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes and options of a `Decoder`. The defaults are the paper's GPT-0.1B (GPT-2 small without biases).

    block: longest sequence. vocabulary: rows of the embedding; token ids must be below it. key_value_heads: fewer than
    `heads` gives grouped-query attention; None: as many. qkv: "fused" (one matrix, seen as q, k and v) or "split" (three).
    activation: "gelu" (exact), "squared_relu", or "swiglu" (gated; its hidden width is 8/3 of `width`, rounded up to a
    multiple of 32, for about as many weights). tied: use the token embedding as output layer. residual_lambdas: block i
    reads r_i * stream + e_i * embedding with learned numbers that start at r_i = 1 and e_i = 0.
    Raises UserError for numbers of heads that do not fit together.
    """

    layers: int = 12
    heads: int = 12
    width: int = 768
    block: int = 1024
    vocabulary: int = 50304
    key_value_heads: int | None = None
    qkv: str = "fused"
    activation: str = "gelu"
    bias: bool = False
    tied: bool = True
    dropout: float = 0.0
    residual_lambdas: bool = False

    def __post_init__(self) -> None:
        if self.width % self.heads:
            raise UserError(f"model.width={self.width} is no multiple of model.heads={self.heads}")
        if self.heads % self.groups:
            raise UserError(f"model.heads={self.heads} is no multiple of model.key_value_heads={self.groups}")

    @property
    def groups(self) -> int:
        """Number of key and value heads."""
        return self.key_value_heads or self.heads

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class SelfAttention(nn.Module):
    """Causal attention over (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        narrow = shape.groups * shape.head_width
        self.widths = (shape.width, narrow, narrow)
        if shape.qkv == "fused":
            self.c_attn = nn.Linear(shape.width, sum(self.widths), bias=shape.bias)
            self.c_attn.fused_rows = dict(zip("qkv", self.widths, strict=True))
        else:
            for name, width in zip("qkv", self.widths, strict=True):
                self.add_module(f"{name}_proj", nn.Linear(shape.width, width, bias=shape.bias))
        self.c_proj = nn.Linear(shape.width, shape.width, bias=shape.bias)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        if self.shape.qkv == "fused":
            parts = self.c_attn(x).split(self.widths, dim=-1)
        else:
            parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (p.view(batch, time, -1, self.shape.head_width).transpose(1, 2) for p in parts)
        rule = {"is_causal": True, "enable_gqa": self.shape.groups != self.shape.heads}
        dropout = self.shape.dropout if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout, **rule)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, time, width))


class FeedForward(nn.Module):
    """Position-wise MLP. The gated form has gate and value in one matrix, which methods see as two."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.activation = shape.activation
        gated = shape.activation == "swiglu"
        hidden = 32 * math.ceil(8 * shape.width / 3 / 32) if gated else 4 * shape.width
        self.c_fc = nn.Linear(shape.width, 2 * hidden if gated else hidden, bias=shape.bias)
        if gated:
            self.c_fc.fused_rows = {"gate": hidden, "up": hidden}
        self.c_proj = nn.Linear(hidden, shape.width, bias=shape.bias)
        # a module, so that dormant units can be counted by hooks
        self.act = {"gelu": nn.GELU, "squared_relu": nn.ReLU, "swiglu": nn.SiLU}[shape.activation]()

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_fc(x)
        if self.activation == "swiglu":
            gate, x = x.chunk(2, dim=-1)
            return self.c_proj(self.act(gate) * x)
        x = self.act(x)
        return self.c_proj(x.square() if self.activation == "squared_relu" else x)


class Block(nn.Module):
    """Pre-norm residual block of attention and MLP over (batch, time, width)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.attn = SelfAttention(shape)
        self.ln_2 = nn.LayerNorm(shape.width, bias=shape.bias)
        self.mlp = FeedForward(shape)
        self.drop = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln_1(x)))
        return x + self.drop(self.mlp(self.ln_2(x)))


class Decoder(nn.Module):
    """GPT-2 style decoder from token ids to logits.

    Weights are drawn from torch's global generator as those of GPT-2 (Radford et al. 2019, section 2.3): normal with
    standard deviation 0.02, in the two projections into the residual stream over sqrt(2 * layers). Norms are 1, biases 0.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(shape.block, shape.width)
        self.drop = nn.Dropout(shape.dropout)
        self.h = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        if shape.residual_lambdas:
            self.residual_lambdas = nn.Parameter(torch.ones(shape.layers))
            self.embedding_lambdas = nn.Parameter(torch.zeros(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width, bias=shape.bias)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.lm_head.is_head = True
        if shape.tied:
            self.lm_head.weight = self.wte.weight
        residual_std = INITIAL_STD / math.sqrt(2 * shape.layers)
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=residual_std if name.endswith("c_proj") else INITIAL_STD)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_STD)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits (batch, time, vocabulary) for ids (batch, time), or with `targets` (batch, time) the mean loss.

        The loss is in nats and in float32, whatever the autocast precision. `time` is at most `block`.
        """
        x = start = self.drop(self.wte(tokens) + self.wpe.weight[: tokens.shape[1]])
        for index, block in enumerate(self.h):
            if self.shape.residual_lambdas:
                x = self.residual_lambdas[index] * x + self.embedding_lambdas[index] * start
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits if targets is None else token_loss(logits, targets)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats of logits (batch, time, vocabulary) and ids (batch, time) other than -100."""
    return functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def adamw(net: nn.Module, *, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on parameters of two or more dimensions only; the loop sets its learning rate."""
    parameters = [p for p in net.parameters() if p.requires_grad]
    matrices, vectors = ([p for p in parameters if (p.dim() >= 2) == large] for large in (True, False))
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, fused=True)
