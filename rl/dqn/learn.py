"""The learning rule of DQN: targets, loss, one update, the exploration schedule."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss
from torch.optim import Optimizer

from rl.replay import Batch


@torch.no_grad()
def td_targets(target: nn.Module, batch: Batch, discount: float) -> Tensor:
    """(B,) r + discount * max_a Q_target(s', a); the future of a terminated step is worth 0, a truncated one counts.

    Plain DQN (Mnih et al. 2015), not double. Unit: clipped reward.
    """
    best = target(batch.next_observations).amax(dim=1)
    return batch.rewards + discount * (1 - batch.terminated) * best


def td_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Mean Huber loss (threshold 1) of the chosen actions' values.

    Args:
        values: (B, actions) network output.
        targets: (B, 2): action index and its target, in one tensor so that it fits the (inputs, targets) form that
            methods with gradients expect. Exact for up to 2^24 actions.
    """
    chosen = values.gather(1, targets[:, :1].long()).squeeze(1)
    return smooth_l1_loss(chosen, targets[:, 1])


def with_actions(batch: Batch, targets: Tensor) -> Tensor:
    """(B, 2) of action and target, see `td_loss`."""
    return torch.stack([batch.actions.float(), targets], dim=1)


def losses(
    net: nn.Module, target: nn.Module, batch: Batch, discount: float, precision: str = "fp32"
) -> tuple[Tensor, Tensor]:
    """Loss of a batch and the mean of its targets.

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
    """Loss, mean of the targets, and the gradients of `trained`, detached: all that a compiled graph of an update holds."""
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
    """One gradient step on `net` in place. Returns the detached loss and mean chosen target, not synchronised.

    `compiled` is `gradients` as one graph; the gradient of the penalty is then added outside it.
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
    """Probability of a random action: 1 until `learning_starts`, then linear to `final` over `decay_steps`."""
    return max(final, 1.0 - (1.0 - final) * max(0, step - learning_starts) / decay_steps)
