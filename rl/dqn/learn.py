"""The learning rule of DQN: targets, loss, one update, the target network, the exploration schedule."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from fire_core import Attached
from harness.device import autocast
from rl.captured import captured
from rl.replay import Batch

Slopes = tuple[Tensor, ...]  # the gradients of the trained parameters


@dataclass
class Learner:
    """The networks and the constants of an update.

    discount: factor of the value one step later. double: whether `net` chooses the next action and `target` only values it.
    precision: "bf16" runs both networks up to their last layer under bfloat16 autocast. compile: see `rl.captured`.
    """

    net: nn.Module
    target: nn.Module
    discount: float
    double: bool = False
    precision: str = "fp32"
    compile: bool = False

    def __post_init__(self) -> None:
        device = next(self.net.parameters()).device
        self.gradients = captured(gradients, device) if self.compile else gradients

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that an update changes; plasticity injection freezes some."""
        return [parameter for parameter in self.net.parameters() if parameter.requires_grad]


@torch.no_grad()
def td_targets(learner: Learner, batch: Batch) -> Tensor:
    """Return the targets (B,) r + discount^k * max_a Q_target(s', a), where r sums up k rewards and s' lies k steps later.

    The second term is 0 after a terminated step, and kept after a truncated one. With `double`, the action is the best
    one of the trained network instead (van Hasselt et al. 2016). Unit: clipped reward.
    """
    values = learner.target(batch.next_observations)
    if learner.double:
        chosen = learner.net(batch.next_observations).argmax(dim=1, keepdim=True)
        best = values.gather(1, chosen).squeeze(1)
    else:
        best = values.amax(dim=1)
    discount = learner.discount if batch.steps is None else learner.discount**batch.steps
    return batch.rewards + discount * (1 - batch.terminated) * best


def td_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Return the mean Huber loss (threshold 1) of the values (B, actions) at the chosen actions.

    targets: (B, 2), action index and target value: one tensor, because methods expect batches of (inputs, targets).
    """
    return smooth_l1_loss(values.gather(1, targets[:, :1].long()).squeeze(1), targets[:, 1])


def with_actions(batch: Batch, targets: Tensor) -> Tensor:
    """Return actions and targets as one tensor (B, 2) for `td_loss`."""
    return torch.stack([batch.actions.float(), targets], dim=1)


def gradients(learner: Learner, trained: list[nn.Parameter], batch: Batch) -> tuple[Tensor, Tensor, Slopes]:
    """Return loss, mean target and gradients of `trained`, all detached: the part of an update that may be compiled."""
    with autocast(batch.rewards.device, learner.precision):
        wanted = td_targets(learner, batch)
    with autocast(batch.rewards.device, learner.precision):  # weights that were cast above have no gradients
        loss = td_loss(learner.net(batch.observations), with_actions(batch, wanted))
    return loss.detach(), wanted.mean(), torch.autograd.grad(loss, trained)


def update(learner: Learner, treatment: Attached, batch: Batch) -> tuple[Tensor, Tensor]:
    """Take one gradient step on the trained network, with the method; return loss and mean target, not synchronised."""
    penalty, trained = treatment.penalty(), learner.trained()
    treatment.optimizer.zero_grad(set_to_none=True)
    loss, value, slopes = learner.gradients(learner, trained, batch)
    for parameter, slope in zip(trained, slopes, strict=True):
        parameter.grad = slope
    if isinstance(penalty, Tensor) and penalty.requires_grad:
        penalty.backward(inputs=trained)
    treatment.before_step()
    treatment.optimizer.step()
    treatment.after_step()
    return loss.clone(), value.clone()


def epsilon(step: int, learning_starts: int, decay_steps: int, final: float) -> float:
    """Return the share of random actions: 1 until `learning_starts`, then linear to `final` over `decay_steps`."""
    return max(final, 1.0 - (1.0 - final) * max(0, step - learning_starts) / decay_steps)
