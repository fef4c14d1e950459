"""Hidden units as the official code sees them: every layer feeds the next one, and a unit is an output of the layer.

It looks at the outputs of Linear and Conv2d before norm and activation, and keeps the last 512 samples of all passes,
training and test. Here each sample is reduced to one row at once, and the last 512 rows are kept.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.passes import undisturbed
from fire_core.report import Report
from fire_core.state import State
from fire_core.units import UnitLayer

KEPT = 512
QUERY, KEY, VALUE = "to_q", "to_k", "to_v"
Reduce = Callable[[UnitLayer, Tensor], Tensor]


def is_attention(name: str) -> bool:
    """Return whether a layer makes queries, keys or values."""
    return name.split(".")[-1] in (QUERY, KEY, VALUE)


def chain(net: nn.Module) -> list[UnitLayer]:
    """Return every Linear and Conv2d that is not on a shortcut, each read by the next one, and the last one by none."""
    layers = [name for name, module in net.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    names = [name for name in layers if "shortcut" not in name]
    readers = [*(((name, 1),) for name in names[1:]), ()]
    units = [len(net.get_parameter(f"{name}.weight")) for name in names]
    return [UnitLayer(name, n, (name,), (), out) for name, n, out in zip(names, units, readers, strict=True)]


def by_channel(output: Tensor) -> Tensor:
    """Return a layer's output as (samples, units, positions)."""
    if output.ndim == 4:
        return output.flatten(2)
    return output.unsqueeze(-1) if output.ndim == 2 else output.mT


def last_rows(kept: Tensor, new: Tensor) -> Tensor:
    """Return the last 512 rows of `kept` followed by `new`, (samples, units)."""
    return torch.cat([kept.to(new.device), new])[-KEPT:]


def inputs_for(method: Any, state: State, which: str) -> Any:
    """Return the test or last inputs that `batches` of vision/train.py offers. Raises UserError in a loop without them."""
    if not hasattr(state.batches, which):
        remedy = f"give attach() `batches` with a method {which}, or use variant=published"
        raise UserError(f"{method.name}: variant=official looks at further images: {remedy}")
    return getattr(state.batches, which)(KEPT)


class OutputRecorder:
    """Hooks that reduce the output of each layer in every training pass, and in all passes of `look`.

    `values[name]` holds `reduce(layer, output)` of the latest pass, where `name` is that of the layer.
    """

    def __init__(self, net: Any, layers: Iterable[UnitLayer], reduce: Reduce) -> None:
        self.net, self.reduce = net, reduce
        self.values: dict[str, Tensor] = {}
        self._looking = False
        # a net with this attribute may leave out tokens that no layer reads; the hooks read all of them
        self._all_tokens = getattr(net, "all_tokens", None)
        if self._all_tokens is not None:
            net.all_tokens = True
        # functions, because a copy of the net shares them, and would copy a bound method with all of this object
        hooks = {layer.name: lambda *call, layer=layer: self._record(layer, *call) for layer in layers}
        self._handles = [net.get_submodule(name).register_forward_hook(hook) for name, hook in hooks.items()]

    def _record(self, layer: UnitLayer, module: nn.Module, inputs: Any, output: Tensor) -> None:
        if self._looking or (module.training and torch.is_grad_enabled()):
            with torch.no_grad():
                self.values[layer.name] = self.reduce(layer, output.detach())

    def look(self, batches: Iterable[Tensor], *, training: bool) -> Iterator[dict[str, Tensor]]:
        """Yield `values` of a pass over each batch, in training or evaluation mode, which leaves the net as it was."""
        self._looking = True
        try:
            with undisturbed(self.net, training=training), torch.no_grad():
                for inputs in batches:
                    self.net(inputs)
                    yield dict(self.values)
                    self.values.clear()
        finally:
            self._looking = False

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self._all_tokens is not None:
            self.net.all_tokens = self._all_tokens


class AfterTest:
    """Mixin that calls `after_test` after every epoch and its test, whose results do not include the changes.

    The official code has no other evaluations; those at boundaries are ours.
    """

    _epoch_ended = False
    after_test: Callable[[State], None]

    def after_pass(self, state: State) -> None:
        self._epoch_ended = True

    def after_evaluation(self, state: State) -> None:
        if self._epoch_ended:
            self._epoch_ended = False
            self.after_test(state)


class WatchesOutputs(AfterTest):
    """Mixin that gives a unit method the units of the official code; it comes before the published class.

    `memory["kept"]` of each layer holds the last 512 rows of `reduce`. The official code has its hooks from step 0 on. If
    the method begins later here, the last batches of the phase before pass through the net once more: this gives the same
    rows if the learning rate of that phase's last epoch was 0, as in Figure 2a.
    """

    reduce: Reduce

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
            for name in state.nets:
                self.keep(name, inputs_for(self, state, "last_inputs"), training=True)
        return report

    def after_test(self: Any, state: State) -> None:
        for name in state.nets:
            self.keep(name, [inputs_for(self, state, "test_inputs")], training=False)

    def keep(self: Any, name: str, batches: Iterable[Tensor], *, training: bool) -> None:
        """Add what a pass over these batches shows of each layer of net `name`."""
        for seen in self.recorders[name].look(batches, training=training):
            for layer, rows in seen.items():
                memory = self.memory[name][layer]
                memory["kept"] = last_rows(memory["kept"], rows)


class ResetsRows:
    """Mixin that gives units new weights and biases from PyTorch's default draw; it comes before the published class."""

    @torch.no_grad()
    def recycle(self: Any, state: State, name: str, layer: UnitLayer, chosen: Tensor) -> None:
        """Draw a whole layer, and take the rows of the units `chosen` from it.

        Of all else, only Adam's step counts of the layer's weight and bias and of the reader's weight change, to 0.
        """
        net, generator = state.nets[name], self.stream(state)
        module: Any = net.get_submodule(layer.name)
        fresh = nn.init.kaiming_uniform_(torch.empty(module.weight.shape), a=5**0.5, generator=generator)
        module.weight[chosen] = fresh[chosen].to(module.weight)
        touched = [module.weight, *(net.get_submodule(reader).weight for reader, _ in layer.outgoing)]
        if module.bias is not None:
            bound = module.weight[0].numel() ** -0.5
            fresh = torch.empty(module.bias.shape).uniform_(-bound, bound, generator=generator)
            module.bias[chosen] = fresh[chosen].to(module.bias)
            touched.append(module.bias)
        for optimizer in state.optimizers.values():
            for parameter in touched:
                if (step := optimizer.state.get(parameter, {}).get("step")) is not None:
                    step.zero_()
        self.counts["recycled"] += len(chosen)
