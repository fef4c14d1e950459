"""What is measured during training: accuracies, and the plasticity of the network."""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import update_bn

from fire_core.measure.plasticity import curvature, plasticity, relative_gradient
from fire_core.passes import undisturbed
from harness.device import autocast
from harness.runs import generator
from harness.trigger import RunTrigger
from vision.schedule import Curriculum, make_inputs


def evaluate(
    net: nn.Module, curriculum: Curriculum, *, train: bool = False, boundary: bool = False
) -> dict[str, float]:
    """Return the accuracy on the whole test set and, in `class_incremental`, on the classes seen so far.

    With `replay`, also on the new classes of the phase and, from phase 1 on, on the old ones. train: also on the training
    images of the phase, with its labels. boundary: also `reestimated` and, with run.curvature, that of a coming batch.
    """
    labels, phase = curriculum.images.test_labels, curriculum.phase
    hits = _hits(net, curriculum, torch.arange(len(labels), device=labels.device), labels, test=True)
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
        hits = _hits(net, curriculum, phase.indices, phase.labels, test=False)
        result["train_accuracy"] = float(hits.mean())
    if boundary:
        result |= reestimated(net, curriculum)
        if curriculum.cfg.run.curvature:
            draw = generator(curriculum.cfg.seed, "curvature", phase.index)
            batch = next(curriculum())
            result["curvature"] = curvature(net.train(), *batch, cross_entropy, generator=draw)
    return result


def reestimated(net: nn.Module, curriculum: Curriculum) -> dict[str, float]:
    """Return the values of `evaluate` as `reestimated_<name>`, with statistics of batch norm from one pass over the phase.

    The running statistics are still those of the weights before the boundary. Empty for a net without batch norm. The net,
    its buffers and modes and the random state stay as they were.
    """
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in net.modules()):
        return {}
    with undisturbed(net, training=True):
        with autocast(curriculum.images.train_images.device, curriculum.cfg.precision):
            update_bn(curriculum(), net)
        found = evaluate(net, curriculum)
    return {f"reestimated_{name}": value for name, value in found.items()}


def measure(
    net: nn.Module, curriculum: Curriculum, trigger: RunTrigger | None = None, *, last: bool = True
) -> dict[str, float]:
    """Return measures of plasticity on the first images of the phase; in other than its `last` epoch, nothing.

    For a trigger that looks at such measures, return them in every epoch, and the norm of the gradient too.
    """
    watched = trigger is not None and trigger.measures
    if not (last or watched):
        return {}
    inputs, labels = curriculum.probe()
    found = plasticity(net, inputs)
    if watched:
        found["relative_gradient"] = relative_gradient(net, inputs, labels, cross_entropy)
    return found


@torch.no_grad()
def _hits(net: nn.Module, curriculum: Curriculum, indices: Tensor, labels: Tensor, *, test: bool) -> Tensor:
    """Return (n,) float32, 1 where the largest logit is that of the label, else 0. The net stays in evaluation mode."""
    net.eval()
    hits, size = [], curriculum.cfg.eval_batch_size
    for part, wanted in zip(indices.split(size), labels.split(size), strict=True):
        inputs = make_inputs(curriculum.images, curriculum.phase, part, test=test)
        with autocast(indices.device, curriculum.cfg.precision):
            hits.append(net(inputs).argmax(dim=1) == wanted)
    return torch.cat(hits).float()


def brief(results: dict[str, float]) -> str:
    """Return the results as text, as in `loss 0.515, accuracy: train 0.881, test 0.079`."""
    loss = [f"loss {results['train_loss']:.3f}"] if "train_loss" in results else []
    parts = ("train", "test", "seen")
    found = [f"{part} {results[key]:.3f}" for part in parts if (key := f"{part}_accuracy") in results]
    return ", ".join([*loss, *([f"accuracy: {', '.join(found)}"] if found else [])])
