"""The learning rule of DQN: targets, loss, one update, the exploration schedule."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.optim import Optimizer

from rl.replay import Batch


@torch.no_grad()
def td_targets(target: nn.Module, batch: Batch, discount: float) -> Tensor:
    """Return the targets (B,) r + discount * max_a Q_target(s', a). The second term is 0 after a terminated step, and
    kept after a truncated one.

    Plain DQN (Mnih et al. 2015), not double. Unit: clipped reward.
    """
    best = target(batch.next_observations).amax(dim=1)
    return batch.rewards + discount * (1 - batch.terminated) * best


def td_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Return the mean Huber loss (threshold 1) of the values of the chosen actions.

    Args:
        values: (B, actions) network output.
        targets: (B, 2), action index and target value. They are one tensor because methods that use gradients expect
            batches of the form (inputs, targets). Exact for up to 2^24 actions.
    """
    chosen = values.gather(1, targets[:, :1].long()).squeeze(1)
    return smooth_l1_loss(chosen, targets[:, 1])


def with_actions(batch: Batch, targets: Tensor) -> Tensor:
    """Return actions and targets as one tensor (B, 2) for `td_loss`."""
    return torch.stack([batch.actions.float(), targets], dim=1)


def losses(
    net: nn.Module, target: nn.Module, batch: Batch, discount: float, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and the mean of its targets.

    precision="bf16" runs both networks up to their last layer under bfloat16 autocast.
    """
    with torch.autocast(batch.rewards.device.type, torch.bfloat16, enabled=precision == "bf16"):
        wanted = td_targets(target, batch, discount)
        return td_loss(net(batch.observations), with_actions(batch, wanted)), wanted.mean()


def gradients(
    net: nn.Module,
    target: nn.Module,
    trained: list[nn.Parameter],
    batch: Batch,
    discount: float,
    precision: str = "fp32",
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return loss, mean target and gradients of `trained`, all detached: the part of an update that is compiled."""
    loss, value = losses(net, target, batch, discount, precision)
    return loss.detach(), value, torch.autograd.grad(loss, trained)


def update(
    net: nn.Module,
    target: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    discount: float,
    penalty: Tensor | float = 0.0,
    precision: str = "fp32",
    compiled: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Take one gradient step on `net` in place. Return loss and mean target, detached and not synchronised.

    `compiled` is `gradients` as one graph; the gradient of the penalty is then added outside the graph.
    """
    optimizer.zero_grad(set_to_none=True)
    if compiled is None:
        loss, value = losses(net, target, batch, discount, precision)
        (loss + penalty).backward()
    else:
        trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
        loss, value, slopes = compiled(net, target, trained, batch, discount, precision)
        for parameter, slope in zip(trained, slopes, strict=True):
            parameter.grad = slope
        if isinstance(penalty, Tensor) and penalty.requires_grad:
            penalty.backward(inputs=trained)
    optimizer.step()
    return loss.detach().clone(), value.detach().clone()


def epsilon(step: int, learning_starts: int, decay_steps: int, final: float) -> float:
    """Return the share of random actions: 1 until `learning_starts`, then linear to `final` over `decay_steps`."""
    return max(final, 1.0 - (1.0 - final) * max(0, step - learning_starts) / decay_steps)
