"""The two tiny nets of the official fixtures, and the formula that fills every tensor (tests/official/README.md)."""

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy

from fire_core import State, snapshot
from fire_core.attach import Attached

METHODS = Path(__file__).parent / "official" / "methods"


def read_arrays(path: Path) -> dict[str, Tensor]:
    with np.load(path) as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def beginning(prefix: str, arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays whose names begin so, by the rest of their names."""
    return {key.removeprefix(prefix): value for key, value in arrays.items() if key.startswith(prefix)}


def load(method: str) -> tuple[dict[str, Tensor], dict]:
    """Arrays and settings recorded for one method."""
    return read_arrays(METHODS / f"{method}.npz"), json.loads((METHODS / f"{method}.json").read_text())


def linear(values: list, bias: list | None = None) -> nn.Linear:
    weight = torch.tensor(values, dtype=torch.float32)
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.load_state_dict({"weight": weight} | ({} if bias is None else {"bias": torch.tensor(bias)}))
    return layer


def state_of(
    net: nn.Module, optimizer: Any = None, batch: Any = None, loss: Any = cross_entropy, phase: int = 1
) -> State:
    """What a method sees of a net that starts here, with one batch (inputs, targets) of data to come."""
    optimizers = {"net": optimizer} if optimizer is not None else {}
    state = State({"net": net}, optimizers, initial=snapshot({"net": net}), loss=loss, phase=phase)
    state.generator = torch.Generator().manual_seed(0)
    state.batches = (lambda: iter([batch])) if batch is not None else None
    return state


def train_step(treatment: Attached, loss: Any) -> None:
    """One step of a loop with a method; `loss` is of the net as it is."""
    treatment.optimizer.zero_grad()
    (loss + treatment.penalty()).backward()
    treatment.before_step()
    treatment.optimizer.step()
    treatment.after_step()


class Net(nn.Module):
    """`function(net, *inputs, **inputs)` with these layers, in this order."""

    def __init__(self, function: Callable, **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.function(self, *inputs, **named)


@contextmanager
def untouched(*nets: nn.Module) -> Iterator[None]:
    """Fail if a value of these nets changes inside the block."""
    before = [{name: value.clone() for name, value in net.state_dict().items()} for net in nets]
    yield
    torch.testing.assert_close([net.state_dict() for net in nets], before, rtol=0, atol=0)


def replica(net: nn.Module) -> nn.Module:
    """The net in DistributedDataParallel, without the several processes that it needs."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = net
    return wrapper


def hooks(net: nn.Module) -> int:
    """How many hooks of the forward pass its modules have."""
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in net.modules())


def u(number: int, *shape: int) -> Tensor:
    """Tensor number `number` in float64: exact integers modulo 65537, scaled to [-1, 1]."""
    k = np.arange(np.prod(shape), dtype=np.int64)
    m = (4093 * k**2 + 6007 * (number + 1) * k + 7919 * number + 101) % 65537
    return torch.from_numpy(2.0 * m / 65536.0 - 1.0).reshape(shape)


def fill(net: nn.Module, first: int = 0, order: Iterable[str] | None = None) -> nn.Module:
    """Give every entry of the state dict its tensor, counting from `first`; in the order of the names, if given."""
    norms = {name for name, each in net.named_modules() if isinstance(each, nn.BatchNorm2d | nn.LayerNorm)}
    filled, own = {}, net.state_dict()
    for number, key in enumerate(order or own, first):
        old = own[key]
        path, _, kind = key.rpartition(".")
        values = u(number, *old.shape) if old.ndim else u(number, 1)[0]
        if kind == "num_batches_tracked":
            values = torch.zeros_like(old)
        elif kind == "running_var":
            values = 0.25 * (1 + 0.5 * values)
        elif kind in ("bias", "running_mean"):
            values = 0.1 * values
        elif path in norms:
            values = 1 + 0.3 * values
        elif kind == "weight":
            values = values / (old.numel() / len(old)) ** 0.5
        filled[key] = values
    net.load_state_dict(filled)
    return net


def images(number: int, count: int, size: int = 8) -> Tensor:
    return (1.5 * u(number, count, 3, size, size)).float()


def tokens(number: int, count: int) -> Tensor:
    return (1.5 * u(number, count, 4, 12)).float()


def labels(count: int, classes: int = 5) -> Tensor:
    return (3 * torch.arange(count) + 1) % classes


class Conv(nn.Module):
    """(n, 3, 8, 8) -> (n, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu1 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU()
        self.conv2, self.bn2 = nn.Conv2d(6, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu2, self.pool = nn.ReLU(), nn.MaxPool2d(2)
        self.fc1, self.relu3, self.fc2 = nn.Linear(128, 12), nn.ReLU(), nn.Linear(12, 5)
        self.fc2.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.pool(self.relu2(self.bn2(self.conv2(x))))
        return self.fc2(self.relu3(self.fc1(x.flatten(1))))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(12, 12, bias=False) for _ in range(3))
        self.to_out = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.to_q(x), self.to_k(x), self.to_v(x))
        q, k, v = (part.unflatten(-1, (2, 6)).transpose(1, 2) for part in parts)
        mixed = (q @ k.mT / 6**0.5).softmax(dim=-1) @ v
        return self.to_out(mixed.transpose(1, 2).flatten(2))


class ViT(nn.Module):
    """(n, 4, 12) -> (n, 5), one pre-norm block."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(1, 5, 12))
        self.class_token = nn.Parameter(torch.zeros(1, 1, 12))
        self.embed = nn.Linear(12, 12)
        self.norm1, self.attention = nn.LayerNorm(12), Attention()
        self.norm2, self.fc1, self.fc2 = nn.LayerNorm(12), nn.Linear(12, 48), nn.Linear(48, 12)
        self.norm, self.head = nn.LayerNorm(12), nn.Linear(12, 5)
        self.head.is_head = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat((self.class_token.expand(len(x), -1, -1), self.embed(x)), dim=1) + self.positions
        x = x + self.attention(self.norm1(x))
        x = x + self.fc2(functional.gelu(self.fc1(self.norm2(x))))
        return self.head(self.norm(x)[:, 0])


NETS = {"conv": Conv, "vit": ViT}


def net(kind: str, first: int = 0) -> nn.Module:
    """A tiny net filled by the formula."""
    return fill(NETS[kind](), first)


def batch(kind: str, number: int, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and labels of one batch of the fixtures."""
    return (images if kind == "conv" else tokens)(number, count), labels(count)


def load_into(net: nn.Module, arrays: dict[str, Tensor], prefix: str) -> nn.Module:
    """Fill a net with the stored tensors `<prefix>.<name>`; those that are not stored stay."""
    own = net.state_dict()
    stored = {key: arrays[f"{prefix}.{key}"] for key in own if f"{prefix}.{key}" in arrays}
    stored = {key: value.reshape(own[key].shape).to(own[key].dtype) for key, value in stored.items()}
    net.load_state_dict(own | stored)
    return net


def largest(ours: Tensor, theirs: Tensor) -> float:
    """Largest absolute difference; NaN where either has one."""
    return float((ours.detach().double() - theirs.double()).abs().max())
