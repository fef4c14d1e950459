"""SWR, selective weight reinitialisation: draw single weights of little use again."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fire_core.errors import UserError, check_settings
from fire_core.methods._units import stream_of
from fire_core.methods.method import FIXTURE, Method, register, start_of
from fire_core.state import State


@register
@dataclass
class SWR(Method):
    """Draws the entries of least utility again, in every parameter by itself, every `every_steps` optimizer steps.

    The utility of an entry is |gradient * weight| ("gradient") or |weight| ("magnitude"), with the weight after the step,
    or with `decay` a running average of it, which starts again at each replacement. "threshold" replaces the entries whose
    utility is at most `factor` times the mean of their parameter, so all of one without gradient; "proportional" replaces
    a share `factor` of the entries, the lowest. New values are normal, with mean and deviation of the parameter's starting
    values. All parameters take part, those of the output and of norm layers too. The optimizer's state stays. Cost: one
    pass over weights and gradients per replacement, at every step with `decay`.

    Args:
        fresh: "resample" draws; "mean" takes the mean of the starting values.
        every_steps, factor: 128 and 5e-4 for the authors' ViT on CIFAR-100, 600 to 2048 and 1e-5 to 2e-4 on MNIST.
    """

    utility: str = "gradient"
    rule: str = "threshold"
    factor: float = 5e-4
    every_steps: int = 128
    decay: float = 0.0
    fresh: str = "resample"

    name = "swr"
    title = "SWR"
    summary = "single weights of little use drawn again at intervals"
    source = "Hernandez-Garcia et al. 2025 (SWR, CoLLAs)"
    proven_by = FIXTURE
    takes_whole_weights = True
    needs = frozenset({"gradients", "initial"})
    off = {"every_steps": 2**62}
    remembers = ("steps", "averages")

    def __post_init__(self) -> None:
        check_settings(self, utility="gradient magnitude", rule="threshold proportional")
        check_settings(self, fresh="resample mean", factor="[0, inf)", every_steps="[1, inf)", decay="[0, 1)")
        self.steps = 0
        self.averages: dict[str, dict[str, Tensor]] = {}

    @torch.no_grad()
    def after_step(self, state: State) -> None:
        self.steps += 1
        due = self.steps % self.every_steps == 0
        stream = stream_of(state, self.name, self.steps)
        if all(p.grad is None for net in state.nets.values() for p in net.parameters()):
            raise UserError("method 'swr' finds no gradients: clear them only before the next backward()")
        for name in state.nets if due or self.decay else ():
            net, start = start_of(state.nets[name], state.initial.get(name))
            averages = self.averages.setdefault(name, {})
            for key, p in net.named_parameters():
                if not p.requires_grad or p.grad is None:
                    continue
                value = (p * p.grad if self.utility == "gradient" else p).abs().float()
                if self.decay:
                    value = averages[key] = torch.lerp(value, averages.get(key, 0 * value), self.decay)
                if due and len(chosen := self.choose(value.flatten(), stream)):
                    fresh = self.draw(start[key], len(chosen), stream).to(p)
                    p.copy_(p.flatten().index_copy(0, chosen, fresh).view_as(p))
                    averages.pop(key, None)

    def choose(self, utility: Tensor, stream: torch.Generator) -> Tensor:
        """Return the indices of the entries to replace, from the utilities (entries,) of one parameter."""
        if self.rule == "threshold":
            return (utility <= self.factor * utility.mean()).nonzero().flatten()
        count, rest = divmod(min(self.factor, 1.0) * len(utility), 1)
        count += torch.rand((), generator=stream, device="cpu").item() < rest
        return utility.argsort(stable=True)[: int(count)]

    def draw(self, start: Tensor, count: int, stream: torch.Generator) -> Tensor:
        """Return new values (count,) for entries of a parameter with these starting values, drawn on the CPU."""
        start = start.float().cpu()
        deviation = start.std(correction=0) if self.fresh == "resample" else 0.0
        return start.mean() + deviation * torch.randn(count, generator=stream, device="cpu")
