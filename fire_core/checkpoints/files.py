"""Weights on disk: one safetensors or torch file, or a Hugging Face folder, which is read but never written."""

import json
import os
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fire_core.copies import weights_in
from fire_core.errors import UserError, first_line
from fire_core.files import load_torch, written_aside
from fire_core.targets import shorten

SAFE = ".safetensors"
WHOLE = ("model.safetensors", "pytorch_model.bin")
SOURCES = [f"{name}{end}" for name in WHOLE for end in ("", ".index.json")]  # in transformers' order
MOST_LEVELS = 200  # of a name: modules are nested, and Python nests about a thousand calls


@dataclass
class Checkpoint:
    """The weights of a file or folder. They are mapped: a weight that is not used takes no memory."""

    path: Path
    tensors: dict[str, Tensor]  # by name; changes reach a file by `save` alone
    entry: str = ""  # dotted path to the weights in a torch file, "" if they are its whole content
    content: Any = None  # all that a torch file holds, with the same tensors in it
    metadata: dict[str, str] | None = None
    config: Path | None = None

    def check_output(self, target: Path) -> None:
        """Raise UserError if `save` cannot write to `target`, and make its folder."""
        suffix = SAFE if self.path.is_dir() else self.path.suffix
        if os.path.lexists(target):
            raise UserError(f"{str(target)!r} exists and is not overwritten: name another output")
        if target.suffix != suffix:
            raise UserError(f"{str(target)!r} should end in {suffix!r}, the format of the output")
        target.parent.mkdir(parents=True, exist_ok=True)

    def save(self, target: Path) -> None:
        """Write the weights to a new file, with all else that a torch file holds, completely or not at all."""
        try:
            with written_aside(target) as aside:
                if self.content is None:
                    tied = Counter(t.data_ptr() for t in self.tensors.values())  # in a torch folder
                    apart = {n: t.clone() if tied[t.data_ptr()] > 1 else t for n, t in self.tensors.items()}
                    save_file({n: t.contiguous() for n, t in apart.items()}, aside, self.metadata)
                else:
                    with aside.open("wb") as file:  # given a path, torch would write that name into the file
                        torch.save(self.content, file)
                self.check_output(target)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch reports a full disk as RuntimeError
            why = f"cannot be written, and nothing was left behind: {first_line(error)}"
            raise UserError(f"{str(target)!r} {why}") from error


def open_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Return the weights at `path`.

    key: dotted path to the weights inside a torch file. By default, they are the entry from which training resumes.
    Raises UserError if there are no weights in a known form, and for damaged files and files that would run code.
    """
    path = Path(path)
    if not path.is_dir() and (not path.is_file() or path.suffix == ".json"):
        why = "is neither a file of weights nor a folder (name that of an index)"
        raise UserError(f"{str(path)!r} {why if path.exists() else 'does not exist'}")
    found = _open_folder(path, key) if path.is_dir() else _open_file(path, key)
    config = (path if path.is_dir() else path.parent) / "config.json"
    described = path.is_dir() or re.match(r"(pytorch_)?model\b.*\.(safetensors|bin)$", path.name)
    found.config = config if described and config.is_file() else None
    return found


def _open_folder(path: Path, key: str | None) -> Checkpoint:
    source = next((path / name for name in SOURCES if (path / name).is_file()), None)
    if source is None:
        raise UserError(f"folder {str(path)!r} holds none of {', '.join(SOURCES)}: name a file in it")
    try:
        index = json.loads(source.read_text("utf-8"))["weight_map"] if source.suffix == ".json" else {}
        files = [path / file for file in sorted(set(index.values()))] or [source]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{source} is not an index ({first_line(error)}): fetch it again") from error
    if missing := [file.name for file in files if file.parent != path or not file.is_file()]:
        raise UserError(f"{source} names {missing[:5]}, which are not files of the folder: fetch them first")
    shards = [_open_file(file, key) for file in files]
    tensors = {name: tensor for shard in shards for name, tensor in shard.tensors.items()}
    if absent := [name for name in index if name not in tensors]:
        raise UserError(f"{path} lacks tensors that its index names ({shorten(absent, 3)}): fetch it again")
    return Checkpoint(path, tensors, metadata=shards[0].metadata)


def _open_file(path: Path, key: str | None) -> Checkpoint:
    if path.suffix != SAFE:
        content = load_torch(path)
        found = Checkpoint(path, *weights_in(content, key, path), content)
    elif key is not None:
        raise UserError(f"key {key!r} is for torch files, and {str(path)!r} is not one: leave it out")
    else:
        try:
            with safe_open(path, framework="pt", device="cpu") as file:
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                found = Checkpoint(path, tensors, metadata=file.metadata())
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    for name, tensor in found.tensors.items():
        if (levels := name.count(".")) > MOST_LEVELS:
            raise UserError(f"{path}: tensor {name[:40]!r} is {levels} levels deep: at most {MOST_LEVELS}")
        if not name.isprintable():
            raise UserError(f"{path}: the name {name[:40]!r} cannot be printed: rename it if you trust it")
        if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
            raise UserError(f"{path}: {name[:40]!r} is sparse, nested or on the meta device: save it dense")
    return found
