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


def losses(net: nn.Module, target: nn.Module, batch: Batch, discount: float) -> tuple[Tensor, Tensor]:
    """Loss of a batch and the mean of its targets."""
    wanted = td_targets(target, batch, discount)
    return td_loss(net(batch.observations), with_actions(batch, wanted)), wanted.mean()


def update(
    net: nn.Module,
    target: nn.Module,
    optimizer: Optimizer,
    batch: Batch,
    discount: float,
    penalty: Tensor | float = 0.0,
    losses: Callable[..., tuple[Tensor, Tensor]] = losses,
) -> tuple[Tensor, Tensor]:
    """One gradient step on `net` in place. Returns the detached loss and mean chosen target, not synchronised.

    `losses` may be a compiled form of the function of that name.
    """
    loss, value = losses(net, target, batch, discount)
    optimizer.zero_grad(set_to_none=True)
    (loss + penalty).backward()
    optimizer.step()
    return loss.detach().clone(), value.detach().clone()


def epsilon(step: int, learning_starts: int, decay_steps: int, final: float) -> float:
    """Probability of a random action: 1 until `learning_starts`, then linear to `final` over `decay_steps`."""
    return max(final, 1.0 - (1.0 - final) * max(0, step - learning_starts) / decay_steps)
