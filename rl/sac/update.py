"""One soft actor-critic update (Haarnoja et al. 2018b, with SimBa's order and losses).

Its order is actor with the old critics, temperature, critics with the new actor and temperature, target critics. Both passes
also take the batches of several agents, (agents, batch, ...), with networks whose weights are stacks (`rl.sac.stack`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.device import autocast
from harness.runs import seeded
from rl.captured import captured
from rl.replay import Batch
from rl.sac.network import Actor, Critics, Temperature, sample_action

# (measurements by name, gradients by the name of their optimizer)
Pass = tuple[dict[str, Tensor], dict[str, tuple[Tensor, ...]]]


@dataclass
class Learner:
    """Networks, optimizers and constants of the updates. `target`, the slow copy of the critics, has no gradients.

    `precision` "bf16" runs the networks up to their output layers under bfloat16 autocast; all else stays float32.
    `compile` runs both passes with their gradients through torch.compile, on a GPU as CUDA graphs.
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
    optimizers: dict[str, Optimizer] = field(init=False)
    trained: dict[str, list[nn.Parameter]] = field(init=False)  # the parameters of each optimizer

    def __post_init__(self):
        self.optimizers = self.new_optimizers()
        self.passes = [captured(f, self.device) if self.compile else f for f in (actor_pass, critic_pass)]

    @property
    def device(self) -> torch.device:
        return self.temperature.log_alpha.device

    def new_optimizers(self) -> dict[str, Optimizer]:
        """Return new optimizers of the present parameters: AdamW for actor and critics, Adam for alpha."""
        self.target.requires_grad_(False)
        nets = self.nets().items()  # Plasticity injection freezes some parameters.
        self.trained = {name: [p for p in net.parameters() if p.requires_grad] for name, net in nets}
        fused = {"lr": self.learning_rate, "fused": True}
        decay = fused | {"weight_decay": self.weight_decay}
        made = {name: torch.optim.AdamW(self.trained[name], **decay) for name in ("actor", "critics")}
        return made | {"temperature": torch.optim.Adam(self.trained["temperature"], **fused)}

    def nets(self) -> dict[str, nn.Module]:
        """Return all modules with weights by name."""
        return {name: getattr(self, name) for name in ("actor", "critics", "target", "temperature")}


def build(cfg: DictConfig, observations: int, actions: int, device: torch.device) -> Learner:
    """Return a learner with newly drawn networks for observations and actions of these lengths."""
    sizes, actor, critic = (observations, actions), cfg.actor, cfg.critic
    with seeded(cfg.seed, "init", "actor"):
        policy = Actor(*sizes, actor.width, actor.blocks, actor.norm or "layer").to(device)
    with seeded(cfg.seed, "init", "critics"):
        shape = critic.width, critic.blocks, critic.count, critic.norm or "layer"
        critics = Critics(*sizes, *shape).to(device)
    temperature, target_entropy = Temperature(cfg.temperature).to(device), -cfg.target_entropy * actions
    constants = ("discount", "tau", "learning_rate", "weight_decay", "precision", "compile")
    rest = {name: cfg[name] for name in constants}
    return Learner(policy, critics, deepcopy(critics), temperature, target_entropy=target_entropy, **rest)


def actor_pass(learner: Learner, batch: Batch, noise: Tensor) -> Pass:
    """Return (measurements, gradients) of the actor and the temperature, with the critics as they are.

    The measurements are detached and 0-d: both losses, and the entropy of the actions in nats.
    """
    with autocast(learner.device, learner.precision):
        action, log_density = sample_action(*learner.actor(batch.observations), noise)
        value = learner.critics(batch.observations, action).amin(dim=-2)
    loss = (learner.temperature().detach()[..., None] * log_density - value).mean(dim=-1)
    entropy = -log_density.detach().mean(dim=-1)
    temperature_loss = learner.temperature() * (entropy - learner.target_entropy)
    figures = {"actor_loss": loss, "entropy": entropy, "temperature_loss": temperature_loss}
    gradients = {"actor": torch.autograd.grad(loss.sum(), learner.trained["actor"])}
    gradients["temperature"] = torch.autograd.grad(temperature_loss.sum(), learner.trained["temperature"])
    return {name: figure.detach() for name, figure in figures.items()}, gradients


def critic_pass(learner: Learner, batch: Batch, noise: Tensor) -> Pass:
    """Return (measurements, gradients) of the critics; the measurements, detached and 0-d, are loss and mean value.

    The loss against the targets r + discount (1 - terminated) (min_i Q'_i(s', a') - alpha log pi(a'|s')) is summed over the
    critics and averaged over the batch, without a factor 1/2, as in the reference implementation. Truncated transitions
    bootstrap, terminated ones do not. `noise` (batch, actions) is standard normal.
    """
    with torch.no_grad():
        with autocast(learner.device, learner.precision):
            action, log_density = sample_action(*learner.actor(batch.next_observations), noise)
            lowest = learner.target(batch.next_observations, action).amin(dim=-2)
        value = lowest - learner.temperature()[..., None] * log_density
        wanted = batch.rewards + learner.discount * (1 - batch.terminated) * value
    with autocast(learner.device, learner.precision):
        values = learner.critics(batch.observations, batch.actions)
    loss = (values - wanted.unsqueeze(-2)).square().sum(dim=-2).mean(dim=-1)
    figures = {"critic_loss": loss.detach(), "value": values.detach().mean(dim=(-2, -1))}
    return figures, {"critics": torch.autograd.grad(loss.sum(), learner.trained["critics"])}


def update(
    learner: Learner,
    batch: Batch,
    noise: Tensor,
    penalty: Tensor | float = 0.0,
    before_step: Callable[[str], object] = lambda name: None,
) -> dict[str, Tensor]:
    """Update actor, temperature, critics and target in place. `noise` (2, batch, actions): for actor, for target.

    `penalty`, a sum of one term for each network, joins the losses of actor and critics; its gradients are those at the
    weights that each of both steps starts from. `before_step` is called with "actor" and with "critics", when the gradients
    of that network are complete; they stay in `.grad` until the next update. Returns detached 0-d tensors (losses, entropy,
    temperature, mean value); nothing is synchronised until they are read.
    """
    of_actor, of_critics = learner.passes
    for parameters in learner.trained.values():
        for parameter in parameters:
            parameter.grad = None
    if isinstance(penalty, Tensor) and penalty.requires_grad:
        penalty.backward(inputs=[*learner.trained["actor"], *learner.trained["critics"]])
    with frozen(learner.trained["critics"]):
        found = of_actor(learner, batch, noise[0])
    figures = take(learner, found)
    before_step("actor")
    learner.optimizers["actor"].step()
    learner.optimizers["temperature"].step()

    figures |= take(learner, of_critics(learner, batch, noise[1]))
    before_step("critics")
    learner.optimizers["critics"].step()

    slow, fast = (list(net.parameters()) for net in (learner.target, learner.critics))
    with torch.no_grad():
        torch._foreach_lerp_(slow, fast, learner.tau)
    return figures | {"temperature": learner.temperature().detach()}


@contextmanager
def frozen(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Treat `parameters` as constants inside the block; gradients still flow through their layers."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def take(learner: Learner, found: Pass) -> dict[str, Tensor]:
    """Add the gradients of a pass to those of a penalty in `.grad`, and return copies of its measurements."""
    measured, gradients = found
    for name, own in gradients.items():
        # the next replay of a CUDA graph overwrites them: keep copies, made in one launch
        own = torch._foreach_mul(own, 1.0) if learner.compile else own
        for parameter, gradient in zip(learner.trained[name], own, strict=True):
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
    return {name: figure.clone() for name, figure in measured.items()}
