"""Tell the weights of a network from copies of them, such as averages, in what files and callbacks hold."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from fire_core.errors import UserError
from fire_core.targets import shorten
from fire_core.targets.model_targets import unwrapped

COPY = re.compile(r"(?:^|[._])(?:ema|swa|averaged?|shadow|teacher|target|polyak|momentum)(?=[._]|model|net)")
MOST_LEVELS = 50  # of nested containers, whose names may have dots


class Likeness:
    """Tells whether something holds tensors like the matrices among `weights`, but not these weights themselves.

    Named tensors fit by shape and name, where one name may be the end of the other ("fc.weight", "module.fc.weight").
    Tensors without names fit if they have exactly the shapes of the weights.
    """

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.own = {id(tensor) for tensor in weights.values()}
        self.names = {(unwrapped(n), t.shape) for n, t in weights.items() if t.dim() > 1}
        self.ends = {(end, shape) for name, shape in self.names for end in _telling(name)}
        self.shapes = Counter(t.shape for t in weights.values() if t.dim() > 1)

    def fits(self, holder: Any) -> bool:
        """Return whether `holder`, a module, a mapping or a sequence, holds such tensors, directly or in a submodule."""
        if isinstance(holder, nn.Module):
            holder = dict(holder.named_parameters())
        items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        found = [(str(name), t) for name, t in items if isinstance(t, Tensor) and t.dim() > 1]
        if not found or any(id(tensor) in self.own for _, tensor in found):
            return False
        if not isinstance(holder, Mapping) or not any(isinstance(key, str) for key in holder):
            return Counter(tensor.shape for _, tensor in found) == self.shapes
        alike = sum(
            (unwrapped(name), t.shape) in self.ends
            or any((end, t.shape) in self.names for end in _telling(unwrapped(name)))
            for name, t in found
        )
        return alike == len(self.names) or (alike == len(found) and 2 * alike >= len(self.names))

    def places(self, holder: Any, path: str = "", seen: set[int] | None = None) -> list[str]:
        """Return the dotted paths of all containers within `holder`, mappings and sequences, that fit."""
        seen = set() if seen is None else seen
        container = isinstance(holder, Mapping | Sequence) and not isinstance(holder, str | bytes)
        if not container or id(holder) in seen or path.count(".") > MOST_LEVELS:
            return []
        seen.add(id(holder))
        if self.fits(holder):
            return [path]
        items = holder.items() if isinstance(holder, Mapping) else enumerate(holder)
        return [place for key, v in items for place in self.places(v, f"{path}.{key}".lstrip("."), seen)]

    def attributes(self, owners: Iterable[Any]) -> Iterator[tuple[str, Any, Any]]:
        """Yield (path, owner, value) of the attributes that fit, of these objects and of the objects in them."""
        for owner in owners:
            for name, value in vars(owner).items():
                inside = {} if isinstance(value, nn.Module) else getattr(value, "__dict__", {})
                held = [(name, value), *((f"{name}.{inner}", part) for inner, part in inside.items())]
                for path, part in held:
                    if isinstance(part, nn.Module | Mapping | list | tuple) and self.fits(part):
                        yield f"{type(owner).__name__}.{path}", owner, part


def ends(name: str) -> list[str]:
    """Return the name without its first 0, 1, ... words: "a.b.c", "b.c", "c"."""
    words = name.split(".")
    return [".".join(words[start:]) for start in range(len(words))]


def _telling(name: str) -> list[str]:
    return ends(name)[:-1] or [name]  # "weight" alone ends too many names


def followers_among(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return {name of a copy: name of the matrix with the same shape that it seems to follow}.

    A copy has a word such as "ema" or "teacher" in its name, and what stands behind it ends the other name, where dots
    and underscores do not count: "ema_model.fc.weight" and "ema_fc_weight" follow "model.fc.weight".
    """
    leaders: dict[tuple[str, object], str] = {}
    for name, tensor in tensors.items():
        if tensor.dim() > 1 and not COPY.search(name):
            for end in _telling(name):
                leaders.setdefault((_letters(end), tensor.shape), name)
    found = {}
    for name, tensor in tensors.items():
        for mark in COPY.finditer(name):
            for rest in (name[mark.end() :], name[mark.end() :].partition(".")[2]):
                if leader := leaders.get((_letters(rest), tensor.shape)):
                    found[name] = leader
    return found


def _letters(name: str) -> str:
    return re.sub("[._]", "", name)


# Lightning's weight averaging keeps the average in state_dict and resumes from current_model_state
ENTRIES = "current_model_state model state_dict model_state_dict module network net nets".split()  # noqa: SIM905


def weights_in(content: Any, key: str | None, path: object) -> tuple[dict[str, Tensor], str]:
    """Return the tensors by name of the entry `key` of a torch file, by default of that which training resumes from.

    Also returns the name of the entry, a dotted path. Raises UserError, with the `path` of the file, if there are none.
    """
    top = content if isinstance(content, Mapping) else {}
    exchanged = ["ema_state_dict"] if "message_hub" in top else []  # mmengine exchanges average and weights
    entries = [*((name, top[name]) for name in exchanged + ENTRIES if name in top), ("", content)]
    if key is not None:
        for word in key.split("."):
            content = content.get(word) if isinstance(content, Mapping) else None
        entries = [(key, content)]
    for name, entry in entries:
        items = entry.items() if isinstance(entry, Mapping) else ()
        tensors = {n: t for n, t in items if isinstance(n, str) and isinstance(t, Tensor)}
        if {*tensors} - {"generator"}:  # which stands at the top of what `Attached.state_dict` returns
            return tensors, name
    holds = shorten([*map(str, top)]) or f"a {type(content).__name__}"
    raise UserError(f"{path} contains no named tensors where they usually are; it holds {holds}: give --key")
