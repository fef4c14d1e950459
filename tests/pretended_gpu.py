"""A pretended GPU: tensors that claim another device and hold their values on the CPU.
Inside `pretended_gpu()`, operations that mix devices raise as on CUDA, as does a CPU generator for a tensor of the GPU.
Reads by the host, which make a GPU wait, and operations, which are launches there, are counted. The claimed device is
"meta", a name that every build of PyTorch accepts. Kernels, memory, streams and torch.compile are not pretended."""

import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from training_scripts import ROOT

import fire_core.targets.model_targets
import harness.runs.checkpoint
from fire_core.attach import Attached

GPU = torch.device("meta")
# These take tensors of both devices on CUDA, too.
MIX = {"copy_", "_to_copy", "index", "_unsafe_index", "index_put", "index_put_", "_index_put_impl_"}
# The sizes or values of these are read by the host.
READ = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount", "equal"}


class Counts:
    """Reads by the host, {(step, place): number}, and operations of the GPU, {step: number}. Steps end with `after_step`."""

    def __init__(self) -> None:
        self.step, self.reads, self.operations = 0, Counter[tuple[int, str]](), Counter[int]()

    def read(self) -> None:
        self.reads[self.step, place()] += 1


def place() -> str:
    """Return file and function of the innermost code of the project, tests not counted, or ""."""
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("tests", ".venv"):
            return f"{path.relative_to(ROOT)} {frame.f_code.co_name}"
    return ""


class Generator(torch.Generator):
    """Takes the place of `torch.Generator`. Those of the GPU draw the numbers of a CPU."""

    on_gpu: ClassVar[list[torch.Generator]] = []

    def __new__(cls, device: Any = "cpu", plain: type = torch.Generator) -> Any:
        made = plain("cpu" if torch.device(device) == GPU else device)
        cls.on_gpu += [made] if torch.device(device) == GPU else []
        return made


class Gpu(Tensor):
    """A tensor of the pretended GPU; `inner` holds its values."""

    is_meta = is_cpu = False
    counts = Counts()

    @staticmethod
    def __new__(cls, inner: Tensor) -> "Gpu":
        layout = {"dtype": inner.dtype, "layout": inner.layout, "storage_offset": inner.storage_offset()}
        self = Tensor._make_wrapper_subclass(cls, inner.size(), strides=inner.stride(), device=GPU, **layout)
        self.inner = inner
        return self

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> Any:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        self.counts.read()
        return self.inner.tolist()

    @staticmethod
    def __torch_dispatch__(*called: Any) -> Any:
        return run(*called)


def run(function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
    """Run one operation on the values; return tensors of the GPU where it belongs there."""
    name, counts, kwargs = function.overloadpacket.__name__, Gpu.counts, kwargs or {}
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    ours = [tensor for tensor in tensors if isinstance(tensor, Gpu)]
    theirs = [tensor for tensor in tensors if not isinstance(tensor, Gpu)]
    if ours and name not in MIX and any(tensor.dim() > 0 for tensor in theirs):
        raise RuntimeError(f"{name} on tensors of the CPU and of the GPU, in {place()}")
    moves = kwargs.get("device") is not None
    there = torch.device(kwargs["device"]) == GPU if moves else bool(ours)
    if name == "copy_":
        there = isinstance(args[0], Gpu)
    generator = kwargs.get("generator")
    ours_too = {each.initial_seed() for each in Generator.on_gpu}  # the object that comes here is a new one
    if there and generator is not None and generator.initial_seed() not in ours_too:
        raise RuntimeError(f"{name}: a CPU generator for a tensor of the GPU, in {place()}")
    leaves = not there and name in ("copy_", "_to_copy")
    masked = "index" in name and any(getattr(each, "dtype", 0) == torch.bool for each in tree_leaves(args[1]))
    if ours and (leaves or masked or name in READ):
        counts.read()
    if there and not function.is_view and name != "_unsafe_view":
        counts.operations[counts.step] += 1
    known = {id(tensor.inner): tensor for tensor in ours}
    args, kwargs = tree_map_only(Gpu, lambda tensor: tensor.inner, (args, kwargs))
    if moves:
        kwargs["device"] = torch.device("cpu")
        kwargs.pop("pin_memory", None)
    found = function(*args, **kwargs)

    def wrap(tensor: Tensor) -> Tensor:
        if id(tensor) in known:  # in place
            return known[id(tensor)]
        stays = not there or isinstance(tensor, Gpu) or any(tensor is other for other in theirs)
        return tensor if stays else Gpu(tensor)

    return tree_map_only(Tensor, wrap, found)


class Operations(TorchDispatchMode):
    def __torch_dispatch__(self, *called: Any) -> Any:
        return run(*called)


class Calls(TorchFunctionMode):
    """What reaches no operation: the making of tensors from numbers, pinning, tolist and numpy."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, ours = dict(kwargs or {}), bool(args) and isinstance(args[0], Gpu)
        if function in (torch.tensor, torch.as_tensor) and str(kwargs.get("device")) == "meta":
            return Gpu(function(*args, **kwargs | {"device": "cpu"}).detach())
        if ours and function in (Tensor.pin_memory, Tensor.numpy):
            raise TypeError(f"{function.__name__} of a tensor of the GPU, in {place()}")
        if function is Tensor.pin_memory:
            return args[0]
        return Gpu.tolist(args[0]) if ours and function is Tensor.tolist else function(*args, **kwargs)


@contextmanager
def pretended_gpu() -> Iterator[Counts]:
    """Make every script that starts inside the block use the pretended GPU; return what is counted."""
    Gpu.counts = counts = Counts()
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for module in ("harness.session", "language.distributed"):
            patch.setattr(f"{module}.pick_device", lambda name: GPU)
        for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
            module, devices = sys.modules[name], ["cpu", "cuda", "meta"]
            for kind in ("fused", "foreach"):  # which exist on a GPU
                name = f"_get_{kind}_kernels_supported_devices"
                patch.setattr(module, name, lambda devices=devices: devices)
            patch.setattr(module, "_foreach_supported_types", [Tensor, torch.nn.Parameter, Gpu])
        patch.setattr(torch, "Generator", Generator)
        patch.setattr(torch.cuda, "mem_get_info", lambda device=None: (2**40, 2**40))
        patch.setattr(fire_core.targets.model_targets, "Tensor", Gpu)  # whose weights count as plain ones
        real, enabled = torch.autocast, torch.is_autocast_enabled
        cpu = {"meta": "cpu"}
        patch.setattr(torch, "autocast", lambda kind, *args, **kw: real(cpu.get(kind, kind), *args, **kw))
        patch.setattr(torch, "is_autocast_enabled", lambda *kind: enabled(*(cpu.get(k, k) for k in kind)))
        save, after_step = harness.runs.checkpoint.save, Attached.after_step

        def save_values(folder: Path, step: int, parts: Any, **given: Any) -> Path:
            return save(folder, step, tree_map_only(Gpu, lambda t: t.inner.detach().clone(), parts), **given)

        def counted(self: Attached, *args: Any, **kwargs: Any) -> None:
            after_step(self, *args, **kwargs)
            counts.step += 1

        patch.setattr(harness.runs.checkpoint, "save", save_values)
        patch.setattr(Attached, "after_step", counted)
        stack.callback(torch.autograd.set_multithreading_enabled, torch.autograd.is_multithreading_enabled())
        torch.autograd.set_multithreading_enabled(False)  # modes are of one thread
        stack.enter_context(Calls())
        stack.enter_context(Operations())
        yield counts
