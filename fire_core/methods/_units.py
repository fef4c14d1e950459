"""Base classes of methods of hidden units: they find unit layers, record activations or gradients, and replace units."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fire_core.errors import UserError, check_settings
from fire_core.methods.method import Method
from fire_core.optim_state import copies_follow, groups_in_one, nest_of
from fire_core.report import Report
from fire_core.seeding import derive, kept_chance
from fire_core.state import State
from fire_core.units import Recorder, UnitLayer, find_unit_layers, incoming, recycle, why_not
from fire_core.wrapped_models import replicas_in

MOST_UNSEEN = 100


@dataclass
class LayerMethod(Method):
    """Base class of methods that know the hidden layers of their nets, and remember something of each.

    Before phase `first_phase` the method does nothing and places no hooks. `close()` removes the hooks.
    """

    takes_whole_weights = True

    def __post_init__(self) -> None:
        self.layers: dict[str, list[UnitLayer]] = {}
        self.memory: dict[str, dict[str, dict[str, Tensor]]] = {}
        self.recorders: dict[str, Any] = {}
        self.modules: dict[str, dict[str, nn.Module]] = {}  # the first of each layer, when its memory began
        self.counts = {"steps": 0, "recycled": 0, "draws": 0}
        self.pending: list[Any] = []  # what `before_step` leaves to `after_step`

    def check(self, state: State) -> None:
        super().check(state)
        if any(map(replicas_in, state.nets.values())):
            raise UserError(f"method {self.name!r} acts on what one process sees: it does not work with DDP")

    def start_memory(self, layer: UnitLayer, device: torch.device) -> dict[str, Tensor]:
        """Return what the method remembers of one layer, by name, as it is at the start."""
        return {}

    def watch(self, net: nn.Module, layers: list[UnitLayer]) -> Any:
        """Place the hooks of the method in `net`, and return the object that holds them; by default none."""
        return Recorder(net, (), torch.abs)

    def boundary(self, state: State) -> Report:
        """Find the layers again, as some may have been frozen or replaced; those that stay keep their memory."""
        self.close()
        before, self.layers = self.layers, {}
        for name, net in state.nets.items():
            modules = self.modules.get(name, {})
            found = [layer for layer in self.find_layers(state, name) if layer in before.get(name, ())]
            same = {layer.name for layer in found if net.get_submodule(layer.name) is modules.get(layer.name)}
            self.memory[name] = {key: kept for key, kept in self.memory.get(name, {}).items() if key in same}
        self._start(state)
        return Report(method=self.name)

    def after_skip(self, state: State) -> None:
        self.pending = []

    def stream(self, state: State) -> torch.Generator:
        """Return a new CPU generator, whose seed depends on `state.generator`, the method and the earlier streams."""
        self.counts["draws"] += 1
        return stream_of(state, self.name, self.counts["draws"] - 1)

    def find_layers(self, state: State, name: str) -> list[UnitLayer]:
        """Return the unit layers of net `name`, found with the first of the coming batches.

        Raises UserError if there are none.
        """
        if name not in self.layers:
            net = state.nets[name]
            with kept_chance():  # a loader that shuffles draws from it
                found, reasons = find_unit_layers(net, next(coming_inputs(state.batches, name, self.name)))
            reasons |= {layer.name: why for layer in found if (why := why_not(net, layer))}
            self.layers[name] = [layer for layer in found if layer.name not in reasons]
            if not self.layers[name]:
                why = "; ".join(f"{key} {reason}" for key, reason in list(reasons.items())[:4])
                wrong = f"method {self.name!r} finds no layer in net {name!r} whose units it could replace"
                raise UserError(f"{wrong}: {why}")
        return self.layers[name]

    def _start(self, state: State) -> None:
        for name, net in state.nets.items():
            if name in self.recorders and self.recorders[name].net is not net:  # another model of this name
                self.recorders.pop(name).remove()
                self.layers.pop(name), self.memory.pop(name)
            if name not in self.recorders:
                layers, device = self.find_layers(state, name), next(net.parameters()).device
                memory = {layer.name: self.start_memory(layer, device) for layer in layers}
                self.memory[name] = memory | self.memory.get(name, {})
                self.modules[name] = {layer.name: net.get_submodule(layer.name) for layer in layers}
                self.recorders[name] = self.watch(net, layers)

    def close(self) -> None:
        """Remove all hooks; a later step puts them back."""
        for recorder in self.recorders.values():
            recorder.remove()
        self.recorders = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the layers found, the method's tensors of each, and the counts."""
        layers = {name: [asdict(layer) for layer in found] for name, found in self.layers.items()}
        return {"layers": layers, "memory": self.memory, "counts": dict(self.counts)}

    def load_state_dict(self, saved: dict[str, Any], state: State) -> None:
        """Restore what `state_dict` returned, and place the hooks."""
        layers = saved["layers"].items()
        self.layers = {name: [UnitLayer(**layer) for layer in found] for name, found in layers}
        self.counts = dict(saved["counts"])
        self.memory = copy.deepcopy(saved["memory"])
        self.close()
        if self.memory:
            self._start(state)


@dataclass
class UnitMethod(LayerMethod):
    """Base class of methods that replace units during training.

    Args:
        fresh: new incoming weights of a unit: "default" (PyTorch's default draw), "he_uniform" (He's uniform draw, 2.45
            times as wide) or "initial" (the unit's own first weights, for nets with an initialisation of their own).
        reset_moments: clear the optimizers' moments of the entries that change.
    """

    fresh: str = "default"
    reset_moments: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, fresh="default he_uniform initial")
        self.unseen = 0  # steps in a row without activations

    def measure(self, activations: Tensor) -> Tensor:
        """Return what to keep of a layer's activations (samples, units) at every step."""
        raise NotImplementedError

    def choose(self, net: nn.Module, layer: UnitLayer, memory: dict[str, Tensor], measured: Tensor) -> Tensor:
        """Update `memory` by one step and return the units to replace, in the form that `indices` reads."""
        raise NotImplementedError

    def indices(self, chosen: list[Tensor]) -> list[Tensor]:
        """Return the indices on the CPU of the units that `choose` has returned for each layer: by default just those."""
        return chosen

    def after_step(self, state: State) -> None:
        """Replace the units that `choose` picks from the activations of this step."""
        self._start(state)
        self.counts["steps"] += 1
        scored = []  # all layers, before the first one changes
        for name, net in state.nets.items():
            for layer in self.layers[name]:
                measured = self.recorders[name].values.pop(layer.name, None)
                if measured is not None:  # the first step of a run that starts in phase 0 was not recorded
                    chosen = self.choose(net, layer, self.memory[name][layer.name], measured)
                    scored.append((name, layer, chosen))
        self.unseen = 0 if scored else self.unseen + 1
        if self.unseen >= MOST_UNSEEN:
            wrong = f"method {self.name!r} saw no activations in {MOST_UNSEEN} steps"
            why = "it records forward passes in training mode, with gradients and outside of torch.compile"
            raise UserError(f"{wrong}: {why}")
        for (name, layer, _), chosen in zip(scored, self.indices([chosen for *_, chosen in scored])):
            if len(chosen):
                self.recycle(state, name, layer, chosen)

    def recycle(self, state: State, name: str, layer: UnitLayer, chosen: Tensor) -> None:
        """Replace the units `chosen` of a layer of net `name`."""
        net, initial = state.nets[name], state.initial[name] if self.fresh == "initial" else None
        law = "he_uniform" if self.fresh == "he_uniform" else "default"
        optimizers = [o for each in state.optimizers.values() for o in nest_of(each) if self.reset_moments]
        if any(map(groups_in_one, optimizers)):
            wrong = "moments of several weights in one tensor cannot be cleared in part"
            raise UserError(f"{wrong}: set reset_moments=False")
        fresh: Any = {"generator": self.stream(state), "initial": initial, "law": law}
        with copies_follow(state.optimizers.values()):
            self.counts["recycled"] += recycle(net, layer, chosen, optimizers=optimizers, **fresh)

    def watch(self, net: nn.Module, layers: list[UnitLayer]) -> Any:
        return Recorder(net, layers, self.measure)


@dataclass
class ForgetfulUnitMethod(UnitMethod):
    """Base class of unit methods that remember nothing of a layer: a checkpoint has their counts, layers are found again."""

    remembers = ("counts",)
    state_dict = Method.state_dict
    load_state_dict = Method.load_state_dict

    def boundary(self, state: State) -> Report:
        self.layers = {}  # they may have been frozen or replaced since
        return Method.boundary(self, state)


def stream_of(state: State, method: str, number: int) -> torch.Generator:
    """Return a CPU generator, whose seed depends on `state.generator`, the name of the method and a number."""
    seed = state.generator.initial_seed() if state.generator is not None else 0
    return torch.Generator().manual_seed(derive(seed, method, number))


def coming_inputs(batches: Callable[[], Iterable[Any]] | None, net: str, method: str) -> Iterator[Any]:
    """Yield the inputs for `net` in the coming batches. Raises UserError if there are none."""
    inputs = None
    for inputs, *_ in map(as_pair, batches() if batches is not None else ()):
        yield inputs_of(net, inputs)
    if inputs is None:
        raise UserError(f"method {method!r} needs data: give attach(batches=...)")


def as_pair(batch: Any) -> Any:
    """Return a batch that begins with its inputs. Raises UserError for a bare tensor and a mapping."""
    if isinstance(batch, Tensor | Mapping):
        raise UserError(f"batches yields a {type(batch).__name__}: let it yield pairs (inputs, targets)")
    return batch


def inputs_of(net: str, inputs: Any) -> Any:
    """Return a batch's inputs for one net: the entry `net` if `inputs` is a mapping with that key, else `inputs`."""
    return inputs[net] if isinstance(inputs, Mapping) and net in inputs else inputs


def gradient_scores(net: nn.Module, layer: UnitLayer) -> Tensor:
    """Return mean |gradient| of the incoming weights of each unit over the mean of its layer, (units,) float32.

    Biases do not count. Gated layers, which have two incoming modules, count both.
    """
    weights = [entries for entries in incoming(net, layer) if entries.read().ndim > 1]
    if any(each.parameter.grad is None for each in weights):
        raise UserError(f"layer {layer.name!r} has no gradient: call before_step() after backward()")
    rows = [each.read(each.parameter.grad).float().abs().flatten(1) for each in weights]
    means = torch.cat(rows, dim=1).mean(dim=1)
    return means / (means.mean() + 1e-8)
