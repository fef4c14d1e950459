"""What is measured of a net in training, and what stops a run: losses that are no numbers."""

from __future__ import annotations

import math

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from fire_core.errors import UserError
from harness.transfer import send
from language.data import IGNORED, Corpus, validation_batches
from language.distributed import World

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """Mixed precision of the config; float32 switches it off."""
    return torch.autocast(device.type, PRECISIONS[precision], enabled=precision != "fp32")


@torch.no_grad()
def evaluate(
    net: nn.Module, corpora: tuple[Corpus, Corpus], cfg: DictConfig, world: World, block: int
) -> dict[str, float]:
    """Validation losses in nats a token: on A, on B, and on the mixture of phase 2 (the mean with its shares).

    block: tokens of a window, those of the phase.
    """
    net.eval()
    losses = []
    for corpus in corpora:
        total = torch.zeros(2, device=world.device, dtype=torch.float64)  # loss and number of all tokens
        batches = validation_batches(corpus, block, cfg.eval_batch_size, cfg.eval_windows)
        for batch, counts in world.deal(batches):
            tokens, targets = (send(part, world.device) for part in batch)
            with autocast(world.device, cfg.precision):
                loss = net(tokens, targets)
            if counts:
                told = (targets != IGNORED).sum()
                total[0] += loss.double() * told
                total[1] += told
        summed = world.mean(total)
        losses.append(finite(float(summed[0] / summed[1]), f"validation loss on {corpus.name}", cfg))
    net.train()
    share = cfg.phase_2.share_a
    return {
        "val_loss_a": losses[0],
        "val_loss_b": losses[1],
        "val_loss_mix": share * losses[0] + (1 - share) * losses[1],
    }


def mean_loss(loss_sum: Tensor, count: int, step: int, cfg: DictConfig) -> float:
    """Mean training loss since the last record; stops the run where it is not a number."""
    return finite(float(loss_sum) / count, f"training loss at step {step}", cfg)


def finite(value: float, what: str, cfg: DictConfig) -> float:
    """The same value; a loss that is no number stops the run."""
    if not math.isfinite(value):
        also = "" if cfg.precision == "fp32" else ", or precision=fp32"
        raise UserError(f"{what} is {value}: try a learning_rate below {cfg.learning_rate}{also}")
    return value
