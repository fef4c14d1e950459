"""Hidden units as the official code sees them: every layer feeds the next one, and a unit is an output of the layer.

The official code looks at the outputs of Linear and Conv2d before norm and activation, and keeps the last 512 samples
of all forward passes, training and test. Here each sample is reduced to one row at once, and the last 512 rows are
kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fire_core.errors import UserError
from fire_core.passes import in_mode, undisturbed
from fire_core.report import Report
from fire_core.state import State
from fire_core.units import UnitLayer

KEPT = 512
QUERY, KEY, VALUE = "to_q", "to_k", "to_v"


def watched_layers(net: nn.Module) -> list[str]:
    """Return the names of every Linear and Conv2d that is not on a shortcut, in module order."""
    return [
        name
        for name, module in net.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d) and "shortcut" not in name
    ]


def is_attention(name: str) -> bool:
    """Return whether a layer makes queries, keys or values."""
    return name.split(".")[-1] in (QUERY, KEY, VALUE)


def chain(net: nn.Module) -> list[UnitLayer]:
    """Return the watched layers, each of them read by the next one in the list, and the last one by none."""
    names = watched_layers(net)
    modules: dict[str, Any] = dict(net.named_modules())
    return [
        UnitLayer(name, len(modules[name].weight), (name,), (), tuple((reader, 1) for reader in readers))
        for name, readers in zip(names, [*([name] for name in names[1:]), []], strict=True)
    ]


def by_channel(output: Tensor) -> Tensor:
    """Return a layer's output as (samples, units, positions)."""
    if output.ndim == 4:
        return output.flatten(2)
    return output.unsqueeze(-1) if output.ndim == 2 else output.mT


def last_rows(kept: Tensor, new: Tensor) -> Tensor:
    """Return the last 512 rows of `kept` followed by `new`, (samples, units)."""
    return torch.cat([kept.to(new.device), new])[-KEPT:]


class OutputRecorder:
    """Hooks that reduce the output of each layer in every training pass, and inside `watching_all` in any pass.

    `values[name]` holds `reduce(layer, output)` of the latest pass, where `name` is that of the layer.
    """

    def __init__(
        self, net: Any, layers: Iterable[UnitLayer], reduce: Callable[[UnitLayer, Tensor], Tensor]
    ) -> None:
        self.net, self.reduce = net, reduce
        self.values: dict[str, Tensor] = {}
        self._always = False
        # a net with this attribute may leave out tokens that no layer reads; the hooks read all of them
        self._all_tokens = getattr(net, "all_tokens", None)
        if self._all_tokens is not None:
            net.all_tokens = True
        modules = dict(net.named_modules())
        self._handles = [modules[layer.name].register_forward_hook(self._hook(layer)) for layer in layers]

    def _hook(self, layer: UnitLayer) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            if self._always or (module.training and torch.is_grad_enabled()):
                with torch.no_grad():
                    self.values[layer.name] = self.reduce(layer, output.detach())

        return hook

    @contextmanager
    def watching_all(self) -> Iterator[None]:
        """Record all passes inside the `with` block, those in evaluation mode too."""
        self._always = True
        try:
            yield
        finally:
            self._always = False

    def take(self) -> dict[str, Tensor]:
        """Return `values` and empty them."""
        values, self.values = self.values, {}
        return values

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._all_tokens is not None:
            self.net.all_tokens = self._all_tokens


class AfterTest:
    """Mixin that calls `after_test` when the evaluation at the end of an epoch is over.

    The official code has no other evaluations; those at boundaries are ours.
    """

    _epoch_ended = False

    def after_test(self, state: State) -> None:
        """Called after every epoch and its test, whose results therefore do not include the changes."""
        raise NotImplementedError

    def after_pass(self, state: State) -> None:
        """Remember that the next evaluation is the test at the end of the epoch."""
        self._epoch_ended = True

    def after_evaluation(self, state: State) -> None:
        if self._epoch_ended:
            self._epoch_ended = False
            self.after_test(state)


class WatchesOutputs(AfterTest):
    """Mixin that gives a unit method the units of the official code; it comes before the published class.

    `memory["kept"]` of each layer holds the last 512 rows of `reduce`. The official code has its hooks from the first
    step of the run. If the method begins later here, the last batches of the phase before pass through the net once
    more. This gives the same rows if the learning rate of that phase's last epoch was 0, as in Figure 2a.
    """

    def reduce(self, layer: UnitLayer, output: Tensor) -> Tensor:
        raise NotImplementedError

    def watch(self, net: nn.Module, layers: list[UnitLayer]) -> OutputRecorder:
        return OutputRecorder(net, layers, self.reduce)

    def check(self: Any, state: State) -> None:
        """Place the hooks before the first step if the method begins in phase 0."""
        if self.first_phase == 0:
            self._start(state)

    def boundary(self: Any, state: State) -> Report:
        """Place the hooks; where the method begins, also keep what the last batches of the phase before show."""
        report = super().boundary(state)  # type: ignore[misc]
        if state.phase == self.first_phase:
            for name, net in state.nets.items():
                for seen in watch_last(state, net, self.recorders[name], self.name):
                    self.keep(name, seen)
        return report

    def after_test(self: Any, state: State) -> None:
        for name, net in state.nets.items():
            self.keep(name, watch_test(state, net, self.recorders[name], self.name))

    def keep(self: Any, name: str, seen: dict[str, Tensor]) -> None:
        """Add what one pass through net `name` showed of each layer."""
        for layer, rows in seen.items():
            memory = self.memory[name][layer]
            memory["kept"] = last_rows(memory["kept"], rows)


class ResetsRows:
    """Mixin that replaces units with `reset_rows`; it comes before the published class."""

    def recycle(self: Any, state: State, name: str, layer: UnitLayer, chosen: Tensor) -> None:
        self.counts["recycled"] += reset_rows(
            state.nets[name],
            layer,
            chosen,
            generator=self.stream(state),
            optimizers=state.optimizers.values(),
        )


def watch_test(state: State, net: nn.Module, recorder: OutputRecorder, method: str) -> dict[str, Tensor]:
    """Return what the hooks record of the last 512 test samples, in evaluation mode, by layer name.

    Raises UserError if the script gave no test samples.
    """
    if "test_inputs" not in state.extras:
        raise UserError(
            f"{method}: variant=official looks at test images: set state.extras['test_inputs'], or use variant=published"
        )
    with recorder.watching_all(), in_mode(net, training=False), torch.no_grad():
        net(state.extras["test_inputs"](KEPT))
    return recorder.take()


def watch_last(
    state: State, net: nn.Module, recorder: OutputRecorder, method: str
) -> Iterator[dict[str, Tensor]]:
    """Yield what the hooks record of the last batches of the phase before, in training mode, by layer name.

    The batches have at least 512 samples where the phase has. Raises UserError if the script gave none.
    """
    if "last_inputs" not in state.extras:
        raise UserError(
            f"{method}: variant=official looks at the last training images of the phase before: set "
            "state.extras['last_inputs'], or use variant=published"
        )
    with recorder.watching_all(), undisturbed(net, training=True), torch.no_grad():
        for inputs in state.extras["last_inputs"](KEPT):
            net(inputs)
            yield recorder.take()


@torch.no_grad()
def reset_rows(
    net: nn.Module,
    layer: UnitLayer,
    chosen: Tensor,
    *,
    generator: torch.Generator,
    optimizers: Iterable[Optimizer] = (),
) -> int:
    """Give the units `chosen` new weights and biases from PyTorch's default draw, in place, and return their number.

    A whole layer is drawn, and the rows of the units are taken from it. Outgoing weights, norms and Adam's moments
    stay, but the step counts of the layer's weight and bias and of the reader's weight become 0.
    """
    module: Any = net.get_submodule(layer.name)
    fresh = nn.init.kaiming_uniform_(torch.empty(module.weight.shape), a=5**0.5, generator=generator)
    module.weight[chosen] = fresh[chosen].to(module.weight)
    touched = [module.weight, *(net.get_submodule(name).weight for name, _ in layer.outgoing)]
    if module.bias is not None:
        bound = module.weight[0].numel() ** -0.5
        fresh = torch.empty(module.bias.shape).uniform_(-bound, bound, generator=generator)
        module.bias[chosen] = fresh[chosen].to(module.bias)
        touched.append(module.bias)
    for optimizer in optimizers:
        for parameter in touched:
            step = optimizer.state.get(parameter, {}).get("step")
            if step is not None:
                step.zero_()
    return len(chosen)
