"""Validation losses during training."""

import torch
from torch import nn

from harness.device import autocast, send
from harness.runs.metrics import finite
from language.data import IGNORED, validation_batches
from language.distributed import World
from language.schedule import PhasePlan


@torch.no_grad()
def evaluate(net: nn.Module, forward: nn.Module, plan: PhasePlan, world: World) -> dict[str, float]:
    """Return the validation losses in nats per token: on A, on B, and their mean weighted by the shares of phase 2.

    forward: `net` or its compiled form, which gets full batches alone and so compiles for one shape. The windows are as long
    as those of the phase `plan`. Raises UserError if a loss is not finite. The net is left in training mode.
    """
    cfg, losses = plan.cfg, []
    net.eval()
    for corpus in plan.mixture.corpora:
        total = torch.zeros(2, device=world.device, dtype=torch.float64)  # sum of losses, number of tokens
        batches = validation_batches(corpus, plan.mixture.block, cfg.eval_batch_size, cfg.eval_windows)
        for batch, counts in world.deal(batches):
            tokens, targets = (send(part, world.device) for part in batch)
            model = forward if len(tokens) == cfg.eval_batch_size else net
            with autocast(world.device, cfg.precision):
                loss = model(tokens, targets)
            if counts:
                told = (targets != IGNORED).sum()
                total[0] += loss.double() * told
                total[1] += told
        summed = world.mean(total)
        losses.append(finite(float(summed[0] / summed[1]), f"validation loss on {corpus.name}", cfg))
    net.train()
    (loss_a, loss_b), share = losses, cfg.phase_2.share_a
    return {"val_loss_a": loss_a, "val_loss_b": loss_b, "val_loss_mix": share * loss_a + (1 - share) * loss_b}
