"""DASH: shrink each weight vector the more, the less it points along the loss's descent direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from fire_core.errors import UserError
from fire_core.fire import observe
from fire_core.methods import Method, register
from fire_core.modes import in_mode
from fire_core.phases import Phase, State
from fire_core.report import Report
from fire_core.targets import find_targets


@register
@dataclass
class Dash(Method):
    """Direction-aware shrinking. G <- (1 - alpha) G + alpha (-gradient) over one pass of the coming data, then every
    vector w of weights is multiplied by max(floor, cos(w, G)); biases entry by entry, so by 1 or by floor.

    A vector is a row of a Linear, and in a convolution one (out, in) kernel (kernels=false: all weights of an output
    channel). evaluation_mode: take the gradients with running statistics (the FIRE code copies the net as its last test
    left it). every_steps > 0 is the per-step form: no pass at the boundary; G follows the training gradients, and after
    every so many steps w is multiplied by 1 - rate * (1 - max(floor, cos)), which lies in [1 - rate (1 - floor), 1].
    Where the gradient is zero the cosine is too: a boundary multiplies the weights of a dead unit by `floor`, and a net
    whose units have all died is shrunk away.
    Cost: one epoch of gradients per boundary (or two passes over the weights per step), and one copy of the weights.
    """

    alpha: float = 0.3
    floor: float = 0.05
    kernels: bool = True
    biases: bool = True
    evaluation_mode: bool = False
    every_steps: int = 0
    rate: float = 1.0
    targets: str | list[str] = "all"

    name: ClassVar[str] = "dash"
    summary: ClassVar[str] = "direction-aware shrinking by the gradient of the new data"
    source: ClassVar[str] = "Shin et al. 2024 (DASH, arXiv 2410.23495), Algorithm 1"
    domains: ClassVar[tuple[str, ...]] = ("vision", "language", "dqn")  # wants one net with its batches

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha <= 1.0 or not 0.0 <= self.floor <= 1.0 or not 0.0 <= self.rate <= 1.0:
            raise UserError(
                f"alpha={self.alpha}, floor={self.floor}, rate={self.rate} must lie in [0, 1], alpha not 0"
            )
        if self.rate != 1.0 and not self.every_steps:
            raise UserError(
                f"rate={self.rate} is for the per-step form: give every_steps too, or leave it out"
            )
        self.steps = 0
        self.descent: dict[str, dict[str, Tensor]] = {}

    def check(self, state: State) -> None:
        for net in state.nets.values():
            find_targets(net, self.targets)

    def at_boundary(self, state: State, phase: Phase) -> Report:
        if self.every_steps or phase.index < self.first_phase:
            return Report(method=self.name)
        reports = {}
        for name, net in state.nets.items():
            with observe(net, action="shrunk", method=self.name, initial=state.initial.get(name)) as report:
                self.shrink(net, self._descent(state, name, net), strength=1.0)
            reports[name] = report
        return Report.merge(reports, self.name)

    def after_step(self, state: State) -> None:
        if not self.every_steps or state.phase < self.first_phase:
            return
        self.steps += 1
        for name, net in state.nets.items():
            known = self.descent.setdefault(name, {})
            for key, parameter in net.named_parameters():
                if parameter.grad is not None:
                    old = known.get(key, torch.zeros_like(parameter))
                    known[key] = torch.lerp(old.to(parameter.device), -parameter.grad, self.alpha)
            if self.steps % self.every_steps == 0:
                self.shrink(net, known, self.rate)

    @torch.no_grad()
    def shrink(self, net: nn.Module, descent: dict[str, Tensor], strength: float) -> None:
        """Multiply the vectors of `net` by 1 - strength * (1 - max(floor, cos)); parameters without a direction stay."""
        parameters: dict[str, Tensor] = dict(net.named_parameters())
        table = find_targets(net, self.targets)
        modules = {target.module for target in table.included}
        start = 2 if self.kernels else 1
        for key in dict.fromkeys(t.parameter for t in table.included if t.kind == "conv"):
            if key in descent:
                weight = parameters[key]
                factor = self._factor(weight.flatten(start), descent[key].flatten(start), strength)
                weight.mul_(factor.view(*factor.shape, *[1] * (weight.ndim - start)))
        for target in table:
            if target.parameter not in descent:
                continue
            if target.included and target.kind != "conv":
                rows = target.matrix(parameters)
                factor = self._factor(rows, target.matrix(descent), strength)
                target.write(parameters, rows * factor.unsqueeze(-1))
            elif target.kind == "bias" and self.biases and target.module in modules:
                entries, directions = parameters[target.parameter], descent[target.parameter]
                entries.mul_(self._factor(entries.unsqueeze(-1), directions.unsqueeze(-1), strength))

    def _factor(self, vectors: Tensor, directions: Tensor, strength: float) -> Tensor:
        """What each vector (last dimension) is multiplied by."""
        cosine = cosine_similarity(vectors.float(), directions.float(), dim=-1).clamp(self.floor, 1.0)
        return (1.0 - strength * (1.0 - cosine)).to(vectors.dtype)

    def _descent(self, state: State, name: str, net: nn.Module) -> dict[str, Tensor]:
        """Moving average of the negative gradient over one pass; buffers, mode and the CPU's random state are put back."""
        if state.batches is None or state.loss is None:
            raise UserError(
                "method 'dash' needs gradients of the coming data: set state.batches and state.loss"
            )
        parameters = {key: p for key, p in net.named_parameters() if p.requires_grad}
        descent: dict[str, Tensor] = {}  # of parameters that the loss depends on
        buffers = {key: value.clone() for key, value in net.named_buffers()}
        mode = in_mode(net, training=not self.evaluation_mode)
        with mode, torch.random.fork_rng(devices=[]), torch.enable_grad():
            for inputs, targets in state.batches():
                inputs = inputs[name] if isinstance(inputs, dict) else inputs
                output = net(*inputs) if isinstance(inputs, tuple) else net(inputs)
                gradients = torch.autograd.grad(
                    state.loss(output, targets), list(parameters.values()), allow_unused=True
                )
                for key, gradient in zip(parameters, gradients, strict=True):
                    if gradient is not None:
                        descent.setdefault(key, torch.zeros_like(gradient)).lerp_(-gradient, self.alpha)
        with torch.no_grad():
            for key, value in net.named_buffers():
                value.copy_(buffers[key])
        return descent

    def state_dict(self) -> dict[str, Any]:
        return {"method": self.name, "steps": self.steps, "descent": self.descent}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if saved.get("method") == self.name:  # else a trunk that another method trained
            self.steps, self.descent = saved["steps"], saved["descent"]
