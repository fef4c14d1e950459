"""One soft actor-critic update (Haarnoja et al. 2018b, with SimBa's order and losses).

Order inside one update: actor against the old critics, temperature, critics against the new actor and the new
temperature, target critics. All randomness enters through `noise`, so an update is a pure function of its inputs and
can be checked by hand, replayed and captured.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from rl.captured import captured
from rl.replay import Batch
from rl.sac.network import Actor, Critics, Temperature, sample_action


@dataclass
class Learner:
    """What an update changes, and its constants. `target` holds the slow copy of the critics and has no gradients.

    `precision` "bf16" runs the matrix products of the networks in bfloat16; weights, losses and optimizers stay float32.
    `compile` runs both passes through torch.compile, as CUDA graphs on a GPU.
    """

    actor: Actor
    critics: Critics
    target: Critics
    temperature: Temperature
    discount: float
    tau: float
    target_entropy: float
    learning_rate: float
    weight_decay: float
    precision: str = "fp32"
    compile: bool = False
    optimizers: dict[str, torch.optim.Optimizer] = field(init=False, default_factory=dict)

    def __post_init__(self):
        self.renew_optimizers()
        device = self.temperature.log_alpha.device
        self.losses = [captured(f, device) if self.compile else f for f in (actor_losses, critic_losses)]

    def renew_optimizers(self) -> None:
        """Fresh optimizers for whatever parameters exist now: AdamW on all (biases and norms too), Adam on alpha."""
        adamw = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "fused": True}
        self.target.requires_grad_(False)
        self.optimizers.clear()
        self.optimizers["actor"] = torch.optim.AdamW(trainable(self.actor), **adamw)
        self.optimizers["critics"] = torch.optim.AdamW(trainable(self.critics), **adamw)
        self.optimizers["temperature"] = torch.optim.Adam(
            self.temperature.parameters(), lr=self.learning_rate
        )

    def autocast(self) -> torch.autocast:
        """Context of every pass through the networks in an update."""
        device = self.temperature.log_alpha.device.type
        return torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16")

    def nets(self) -> dict[str, nn.Module]:
        """Everything with weights, by name, for a checkpoint."""
        return {
            "actor": self.actor,
            "critics": self.critics,
            "target": self.target,
            "temperature": self.temperature,
        }


def trainable(module: nn.Module) -> list[nn.Parameter]:
    """The parameters an optimizer may change (plasticity injection freezes some)."""
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


def critic_target(learner: Learner, batch: Batch, noise: Tensor) -> Tensor:
    """Soft Bellman target (batch,): r + discount (1 - terminated) (min_i Q'_i(s', a') - alpha log pi(a'|s')).

    Truncated transitions bootstrap, terminated ones do not. `noise` (batch, actions) is standard normal.
    """
    with torch.no_grad():
        with learner.autocast():
            action, log_density = sample_action(*learner.actor(batch.next_observations), noise)
            lowest = learner.target(batch.next_observations, action).amin(dim=0)
        value = lowest - learner.temperature() * log_density
        return batch.rewards + learner.discount * (1 - batch.terminated) * value


def actor_losses(learner: Learner, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of the actor against the critics, and the entropy of its actions in nats, both 0-d."""
    with learner.autocast():
        action, log_density = sample_action(*learner.actor(batch.observations), noise)
        value = learner.critics(batch.observations, action).amin(dim=0)
    loss = (learner.temperature().detach() * log_density - value).mean()
    return loss, -log_density.detach().mean()


def critic_losses(learner: Learner, batch: Batch, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Loss of the critics against the soft Bellman target, and their mean value, both 0-d.

    Sum over the critics, mean over the batch, no factor one half: as in the reference implementation.
    """
    wanted = critic_target(learner, batch, noise)
    with learner.autocast():
        values = learner.critics(batch.observations, batch.actions)
    return (values - wanted).square().sum(dim=0).mean(), values.detach().mean()


def update(
    learner: Learner, batch: Batch, noise: Tensor, penalty: Callable[[], Tensor | float] = lambda: 0.0
) -> dict[str, Tensor]:
    """One update of actor, temperature, critics and target, in place. `noise` (2, batch, actions): actor, target.

    `penalty` is added to both losses; each step sees the gradient of its own network's share.
    Returns detached 0-d tensors (losses, entropy, temperature, mean value); reading them is the only synchronisation.
    Gradients are computed for the network that is updated and for no other: the actor's pass through the critics
    leaves out their weight gradients.
    """
    of_actor, of_critics = learner.losses
    with frozen(learner.optimizers["critics"]):
        actor_loss, entropy = of_actor(learner, batch, noise[0])
    step(learner.optimizers["actor"], actor_loss + penalty())
    figures = {"actor_loss": actor_loss.detach().clone(), "entropy": entropy.clone()}

    temperature_loss = learner.temperature() * (figures["entropy"] - learner.target_entropy)
    step(learner.optimizers["temperature"], temperature_loss)

    critic_loss, value = of_critics(learner, batch, noise[1])
    step(learner.optimizers["critics"], critic_loss + penalty())

    with torch.no_grad():
        torch._foreach_lerp_(
            list(learner.target.parameters()), list(learner.critics.parameters()), learner.tau
        )
    return figures | {
        "critic_loss": critic_loss.detach().clone(),
        "temperature_loss": temperature_loss.detach(),
        "temperature": learner.temperature().detach(),
        "value": value.clone(),
    }


@contextmanager
def frozen(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the parameters of `optimizer` are constants: gradients pass through their layers and none is computed
    for them."""
    for parameter in parameters_of(optimizer):
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters_of(optimizer):
            parameter.requires_grad_(True)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """All parameters of all groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def step(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """One optimizer step with the gradients of `loss` with respect to this optimizer's parameters only."""
    loss.backward(inputs=parameters_of(optimizer))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
