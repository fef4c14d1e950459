"""A stand-in for a GPU: torch's meta device, watched for what a GPU would refuse and for what would make it wait.

On a machine with a GPU, `watched` watches that one instead, through PyTorch's own warnings.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[1]
DEVICE = "cuda" if torch.cuda.is_available() else "meta"
aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.copy_.default)
READS = ("_local_scalar_dense", "equal", "is_nonzero")
SIZES_FROM_VALUES = ("nonzero", "masked_select", "_unique", "_unique2", "unique_dim", "unique_consecutive")
INDEXING = ("index", "index_put_", "index_put", "_index_put_impl_", "_unsafe_index_put")


class DevicesMixed(Exception):
    """An operation got tensors of two devices, or a generator of the wrong one."""


class Waits:
    """Where the host waited for the device: optimizer steps done by then, reason, and the project's part of the stack."""

    def __init__(self) -> None:
        self.steps = 0
        self.found: list[tuple[int, str, list[tuple[str, int, str]]]] = []

    def note(self, reason: str) -> None:
        """Called where the host waits."""
        frame, stack = sys._getframe(1), []
        while frame is not None:
            path = Path(frame.f_code.co_filename)
            if (
                path.is_relative_to(ROOT)
                and not path.is_relative_to(ROOT / "tests")
                and ".venv" not in path.parts
            ):
                stack.append((str(path.relative_to(ROOT)), frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        self.found.append((self.steps, reason, stack))

    def steady(self, script: str, lines: set[int]) -> dict[str, str]:
        """{"file function": reason} of the waits inside these lines of a script that came in three steps or more."""
        when: dict[str, set[int]] = {}
        reasons: dict[str, str] = {}
        for step, reason, stack in self.found:
            if any(path == script and line in lines for path, line, _ in stack):
                path, _, function = stack[0]
                when.setdefault(f"{path} {function}", set()).add(step)
                reasons[f"{path} {function}"] = reason
        return {place: reasons[place] for place, steps in when.items() if len(steps) > 2}


class Shadows:
    """The values of tensors on the meta device, which has none: a storage on the CPU for each storage there."""

    def __init__(self) -> None:
        self.values: dict[int, tuple[StorageWeakRef, torch.UntypedStorage]] = {}
        self.owners: dict[int, int] = {}  # the other way round

    def of(self, tensor: Tensor) -> Tensor:
        """The same tensor on the CPU; entries that nobody wrote are 1."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self.values:
            values = torch.ones(storage.nbytes() // tensor.element_size(), dtype=tensor.dtype)
            self.bind(storage, values.untyped_storage())
        empty = torch.empty(0, dtype=tensor.dtype)
        values = self.values[storage._cdata][1]
        return empty.set_(values, tensor.storage_offset(), tensor.shape, tensor.stride())

    def back(self, values: Tensor) -> Tensor:
        """A tensor on the meta device with these values; a view where its values are one."""
        storage = values.untyped_storage()
        reference, _ = self.values.get(self.owners.get(storage._cdata, 0), (None, None))
        if reference is None or reference.expired():
            owner = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta").untyped_storage()
            self.bind(owner, storage)
        else:
            owner = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
        empty = torch.empty(0, dtype=values.dtype, device="meta")
        return empty.set_(owner, values.storage_offset(), values.shape, values.stride())

    def bind(self, owner: torch.UntypedStorage, values: torch.UntypedStorage) -> None:
        if len(self.values) > 4000:
            self.values = {key: pair for key, pair in self.values.items() if not pair[0].expired()}
            self.owners = {pair[1]._cdata: key for key, pair in self.values.items()}
        self.values[owner._cdata] = (StorageWeakRef(owner), values)
        self.owners[values._cdata] = owner._cdata


class Watch(TorchDispatchMode):
    """Runs the operations of the meta device on the CPU; refuses what a GPU refuses, notes what makes a GPU wait."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits
        self.shadows = Shadows()
        self.pinned: dict[int, Tensor] = {}  # by address; kept, so that no address comes twice

    def pin(self, tensor: Tensor) -> Tensor:
        copy = tensor.clone()
        self.pinned[copy.untyped_storage().data_ptr()] = copy
        return copy

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        wanted = torch.device(kwargs["device"]).type if kwargs.get("device") is not None else None
        on_device = any(t.device.type == "meta" for t in tensors)
        if not on_device and wanted != "meta":
            return op(*args, **kwargs)
        if op in COPIES:
            self.note_copy(op, args, kwargs)
        else:
            self.check(op, args, kwargs, tensors)
        into_cpu = op is aten.copy_.default and args[0].device.type == "cpu"
        return self.run(op, args, kwargs, wanted or ("cpu" if into_cpu else "meta"))

    def run(self, op: Any, args: Any, kwargs: Any, to: str) -> Any:
        """The operation on the values, its results on the device `to`."""
        known: dict[int, Tensor] = {}

        def values(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.device.type == "meta":
                shadow = self.shadows.of(leaf)
                known[id(shadow)] = leaf
                kept.append(shadow)
                return shadow
            return leaf

        def result(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or to == "cpu":
                return leaf
            return known[id(leaf)] if id(leaf) in known else self.shadows.back(leaf)

        kept: list[Tensor] = []
        args, kwargs = tree_map(values, (args, kwargs))
        if "device" in kwargs:
            kwargs = kwargs | {"device": "cpu"}
        if op is aten._to_copy.default:  # on one device it would give the very same values
            kwargs = kwargs | {"non_blocking": False}
        found = op(*args, **kwargs)
        return tree_map(result, found)

    def check(self, op: Any, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        name = op.overloadpacket.__name__
        if name in READS:
            self.waits.note("a number is read")
        if name in SIZES_FROM_VALUES:
            self.waits.note("a size depends on values")
        if name in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                self.waits.note("a mask is an index")
            if any(index.device.type == "cpu" for index in indices):
                self.waits.note("an index comes from the CPU")
            tensors = [t for t in tensors if not any(t is index for index in indices)]
        # numbers on the CPU may take part: they travel with the launch
        if any(t.device.type == "cpu" and t.dim() > 0 for t in tensors):
            shapes = ", ".join(f"{t.device.type} {tuple(t.shape)}" for t in tensors)
            raise DevicesMixed(f"{op} mixes devices: {shapes}")
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator):
            raise DevicesMixed(f"{op} on the device with a generator of the {generator.device.type}")

    def note_copy(self, op: Any, args: Any, kwargs: Any) -> None:
        if op is aten.copy_.default:
            into, source = args[0].device.type, args[1]
            waiting = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        else:
            source, waiting = args[0], not kwargs.get("non_blocking", False)
            into = torch.device(kwargs.get("device") or source.device).type
        from_cpu = source.device.type == "cpu"
        if not from_cpu and into == "cpu":
            self.waits.note("a copy to the CPU")
        elif from_cpu and (waiting or source.untyped_storage().data_ptr() not in self.pinned):
            self.waits.note("a copy to the device that is not pinned and non-blocking")


class Constructors(TorchFunctionMode):
    """Sees tensors that are made of Python's numbers on the device, which a dispatch mode does not."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function in (torch.tensor, torch.as_tensor, Tensor.new_tensor):
            device = kwargs.get("device") or (args[0].device if function is Tensor.new_tensor else "cpu")
            if torch.device(device).type == "meta" and not isinstance(args[0], Tensor):
                return function(*args, **kwargs | {"device": "cpu"}).to("meta")  # which the watch sees
        return function(*args, **kwargs)


@contextmanager
def watched() -> Iterator[Waits]:
    """Watch DEVICE inside the body."""
    waits = Waits()

    def step(*arguments: Any) -> None:
        waits.steps += 1

    with ExitStack() as stack:
        hook = register_optimizer_step_post_hook(step)
        stack.callback(hook.remove)
        for manager in [_warnings(waits)] if DEVICE == "cuda" else _meta(waits):
            stack.enter_context(manager)
        yield waits


def _meta(waits: Waits) -> list[Any]:
    """What lets our scripts run on the meta device, and the watch last, so that nothing of it is seen."""
    watch = Watch(waits)
    replaced: list[Any] = [
        patch.dict("harness.launch.DEVICES", meta=lambda: True),
        patch.object(Tensor, "pin_memory", lambda tensor: watch.pin(tensor)),
        patch.object(torch, "autocast", lambda *arguments, **settings: nullcontext()),
        patch.object(torch, "is_autocast_enabled", lambda *arguments: False),
        patch("fire_core.engine.check_targets", lambda *_: None),  # refuses weights without values
        patch("fire_core.solvers.polar.check_matrices", lambda *_: None),  # so does this
        patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["cpu", "meta"]),
    ]
    return [*replaced, watch, Constructors()]


@contextmanager
def _warnings(waits: Waits) -> Iterator[None]:
    """PyTorch's warning at each synchronisation, noted while the stack that caused it is there."""

    def note(message: Any, *arguments: Any, **settings: Any) -> None:
        if "synchroniz" in str(message):
            waits.note("a synchronisation")

    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
