"""Accuracies during training."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn

from fire_core.passes import undisturbed
from vision.images import Images
from vision.protocols import PhaseData, make_batch


def evaluate(
    net: nn.Module,
    images: Images,
    phase: PhaseData,
    cfg: DictConfig,
    *,
    train: bool = False,
    coming: Iterable[tuple[Tensor, Tensor]] = (),
) -> dict[str, float]:
    """Return the accuracy on the whole test set and, in `class_incremental`, on the classes seen so far.

    With `replay`, also on the new classes of the phase and, from phase 1 on, on the old ones. train: also on the training
    images of the phase, with the labels that it gives them. coming: batches for `reestimated`, which is added.
    """
    labels = images.test_labels
    hits = _hits(net, images, phase, torch.arange(len(labels), device=labels.device), labels, cfg, test=True)
    result = {"test_accuracy": float(hits.mean())}
    if phase.seen is not None:
        seen = torch.isin(labels, phase.seen)
        result["seen_accuracy"] = float(hits[seen].mean())
        if phase.new is not None:
            new = torch.isin(labels, phase.new)
            result["new_accuracy"] = float(hits[new].mean())
            if phase.index > 0:
                result["old_accuracy"] = float(hits[seen & ~new].mean())
    if train:
        hits = _hits(net, images, phase, phase.indices, phase.labels, cfg, test=False)
        result["train_accuracy"] = float(hits.mean())
    return result | (reestimated(net, images, phase, cfg, coming) if coming else {})


def reestimated(
    net: nn.Module,
    images: Images,
    phase: PhaseData,
    cfg: DictConfig,
    batches: Iterable[tuple[Tensor, Tensor]],
) -> dict[str, float]:
    """Return the values of `evaluate` as `reestimated_<name>`, with statistics of batch norm from one pass over `batches`.

    They show what the weights still know: the running statistics are those of the weights before the boundary. Empty for
    a net without batch norm. The net, its buffers and modes and the random state stay as they were.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules()):
        return {}
    with undisturbed(net, training=True):
        with torch.autocast(phase.indices.device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
            update_bn(batches, net)
        found = evaluate(net, images, phase, cfg)
    return {f"reestimated_{name}": value for name, value in found.items()}


@torch.no_grad()
def _hits(
    net: nn.Module,
    images: Images,
    phase: PhaseData,
    indices: Tensor,
    labels: Tensor,
    cfg: DictConfig,
    *,
    test: bool,
) -> Tensor:
    """Return (n,) float32, 1 where the largest logit is that of the label, else 0. The net stays in evaluation mode."""
    net.eval()
    hits = []
    for part, wanted in zip(
        indices.split(cfg.eval_batch_size), labels.split(cfg.eval_batch_size), strict=True
    ):
        inputs, _ = make_batch(images, phase, part, wanted, test=test)
        with torch.autocast(inputs.device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
            hits.append(net(inputs).argmax(dim=1) == wanted)
    return torch.cat(hits).float()


def brief(results: dict[str, float]) -> str:
    """Return the results as text, as in `loss 0.515, accuracy: train 0.881, test 0.079`."""
    loss = [f"loss {results['train_loss']:.3f}"] if "train_loss" in results else []
    parts = ("train", "test", "seen")
    found = [f"{part} {results[key]:.3f}" for part in parts if (key := f"{part}_accuracy") in results]
    return ", ".join([*loss, *([f"accuracy: {', '.join(found)}"] if found else [])])
