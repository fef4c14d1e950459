"""The learning rule of DQN: targets, loss, one update, the target network, the exploration schedule."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.functional import smooth_l1_loss

from fire_core import Attached
from rl.captured import captured
from rl.replay import Batch


@dataclass
class Learner:
    """The networks and the constants of an update.

    Args:
        net, target: the trained network and the one that targets come from.
        discount: factor of the value one step later.
        double: whether `net` chooses the next action and `target` only values it.
        target_ema: share of its old weights that `target` keeps in each update; None: it is copied from time to time.
        precision: "bf16" runs both networks up to their last layer under bfloat16 autocast.
        compiled: `gradients` as one graph, see `rl.captured`; None: eager.
    """

    net: nn.Module
    target: nn.Module
    discount: float
    double: bool = False
    target_ema: float | None = None
    precision: str = "fp32"
    compiled: Callable[..., tuple[Tensor, Tensor, tuple[Tensor, ...]]] | None = field(
        default=None, repr=False
    )

    def compile(self, device: torch.device, backend: str = "inductor") -> None:
        """Run loss and gradients as one compiled graph from now on."""
        self.compiled = captured(gradients, device, backend)

    def trained(self) -> list[nn.Parameter]:
        """Return the parameters that an update changes; plasticity injection freezes some."""
        return [parameter for parameter in self.net.parameters() if parameter.requires_grad]

    def copy(self) -> None:
        """Copy the trained network into the target network, unless that is an average."""
        if self.target_ema is None:
            self.target.load_state_dict(self.net.state_dict())


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


def losses(learner: Learner, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return the loss of a batch and the mean of its targets."""
    low = learner.precision == "bf16"
    with torch.autocast(batch.rewards.device.type, torch.bfloat16, enabled=low):
        wanted = td_targets(learner, batch)
        return td_loss(learner.net(batch.observations), with_actions(batch, wanted)), wanted.mean()


def gradients(
    learner: Learner, trained: list[nn.Parameter], batch: Batch
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return loss, mean target and gradients of `trained`, all detached: the part of an update that is compiled."""
    loss, value = losses(learner, batch)
    return loss.detach(), value, torch.autograd.grad(loss, trained)


def update(learner: Learner, treatment: Attached, batch: Batch) -> tuple[Tensor, Tensor]:
    """Take one gradient step on the trained network in place, with the method, and let the target network follow if it is
    an average. Return loss and mean target, detached and not synchronised."""
    optimizer, penalty = treatment.optimizer, treatment.penalty()
    optimizer.zero_grad(set_to_none=True)
    if learner.compiled is None:
        loss, value = losses(learner, batch)
        (loss + penalty).backward()
    else:
        trained = learner.trained()
        loss, value, slopes = learner.compiled(learner, trained, batch)
        for parameter, slope in zip(trained, slopes, strict=True):
            parameter.grad = slope
        if isinstance(penalty, Tensor) and penalty.requires_grad:
            penalty.backward(inputs=trained)
    treatment.before_step()
    optimizer.step()
    treatment.after_step()
    if learner.target_ema is not None:
        with torch.no_grad():
            torch._foreach_lerp_(
                list(learner.target.parameters()), list(learner.net.parameters()), 1 - learner.target_ema
            )
    return loss.detach().clone(), value.detach().clone()


def epsilon(step: int, learning_starts: int, decay_steps: int, final: float) -> float:
    """Return the share of random actions: 1 until `learning_starts`, then linear to `final` over `decay_steps`."""
    return max(final, 1.0 - (1.0 - final) * max(0, step - learning_starts) / decay_steps)
