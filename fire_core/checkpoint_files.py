"""Weights on disk: one safetensors or torch file, or a Hugging Face folder of shards; read safely, one shard at a time.

Torch files are opened with weights-only loading: a file that would run code is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fire_core.errors import UserError

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
WHOLE = ("model.safetensors", "pytorch_model.bin")
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
STATE_KEYS = ("model", "state_dict", "model_state_dict", "module", "network", "net", "nets")


@dataclass
class Shard:
    """One file of weights. `load` gives (tensors by name, whatever else the file holds)."""

    path: Path
    key: str | None = None
    metadata: dict[str, str] | None = field(default=None, repr=False)

    @property
    def safe(self) -> bool:
        return self.path.suffix == ".safetensors"

    def outline(self) -> dict[str, Tensor]:
        """Tensors without their values: on the meta device for safetensors, mapped from the file for torch."""
        if not self.safe:
            return self.load()[0]
        outline = {}
        with _opened(self.path) as file:
            for name in _names(file):
                piece = file.get_slice(name)
                dtype = _DTYPES.get(piece.get_dtype(), torch.uint8)
                outline[name] = torch.empty(piece.get_shape(), dtype=dtype, device="meta")
        return outline

    def load(self) -> tuple[dict[str, Tensor], Any]:
        if self.safe:
            with _opened(self.path) as file:
                self.metadata = file.metadata()
                return {name: file.get_tensor(name) for name in _names(file)}, None
        content = _load_torch(self.path)
        return state_dict_of(content, self.key, self.path), content

    def save(self, path: Path, tensors: Mapping[str, Tensor], content: Any) -> None:
        """Writes the tensors, changed in place since `load`, with all else that the file held."""
        if self.safe:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, self.metadata)
        else:
            torch.save(content, path)


@dataclass
class Checkpoint:
    """A file, or a folder with shards and other files (configuration, tokenizer)."""

    path: Path
    shards: list[Shard]

    @property
    def is_folder(self) -> bool:
        return self.path.is_dir()

    def outline(self) -> dict[str, Tensor]:
        """Every tensor by name, without its values."""
        return {name: tensor for shard in self.shards for name, tensor in shard.outline().items()}


def open_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Finds the shards. `key`: dotted path to the weights inside a torch file. Raises UserError naming what it saw."""
    path = Path(path)
    if not path.exists():
        raise UserError(f"checkpoint {str(path)!r} does not exist")
    if path.is_file():
        return Checkpoint(path, [Shard(path, key)])
    for name in INDICES:
        if (path / name).exists():
            files = _indexed(path / name)
            missing = [file for file in files if not (path / file).exists()]
            if missing or any(Path(file).name != file for file in files):
                raise UserError(
                    f"{path / name} names {missing or files}, which are not in the folder: fetch them first"
                )
            return Checkpoint(path, [Shard(path / file, key) for file in files])
    for name in WHOLE:
        if (path / name).exists():
            return Checkpoint(path, [Shard(path / name, key)])
    raise UserError(f"folder {str(path)!r} holds none of {', '.join((*INDICES, *WHOLE))}: name a file in it")


def _indexed(index: Path) -> list[str]:
    """Names of the shards in a Hugging Face index file."""
    try:
        return sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = "no weight_map" if isinstance(error, KeyError) else error
        raise UserError(f"{index} is not an index of shards ({reason}): fetch it again") from error


def state_dict_of(content: Any, key: str | None, path: Path) -> dict[str, Tensor]:
    """The weights inside what a torch file holds: itself, the entry `key`, or the first usual entry that is one."""
    if key is not None:
        for word in key.split("."):
            if not isinstance(content, Mapping) or word not in content:
                seen = list(content)[:8] if isinstance(content, Mapping) else type(content).__name__
                raise UserError(f"{path} has no {word!r} of key {key!r}; it holds {seen}")
            content = content[word]
        found = _tensors(content)
    else:
        inner = [content[name] for name in STATE_KEYS if isinstance(content, Mapping) and name in content]
        found = next((tensors for tensors in map(_tensors, [content, *inner]) if tensors), None)
    if not found:
        seen = list(content)[:8] if isinstance(content, Mapping) else type(content).__name__
        raise UserError(f"{path} holds no weights by name (it holds {seen}): give the entry with --key")
    return found


@contextmanager
def written_aside(target: Path, like: Checkpoint) -> Iterator[Path]:
    """A temporary place beside `target` that takes its name only when the body has ended without an error."""
    if target.exists():
        raise UserError(f"{str(target)!r} exists and is not overwritten: name another output, or remove it")
    if not like.is_folder and target.suffix != like.path.suffix:
        raise UserError(
            f"{str(target)!r} should end in {like.path.suffix!r} like {like.path.name!r}: it is of that kind"
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no folder for {str(target)!r} can be made ({error}): name another output"
        ) from error
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        made = aside / target.name
        if like.is_folder:
            made.mkdir()
        yield made
        if target.exists():
            raise UserError(f"{str(target)!r} appeared while writing and is not overwritten")
        os.replace(made, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def copy_the_rest(source: Checkpoint, folder: Path) -> None:
    """Copies all that is neither a shard nor one of `other_weights` into the output folder, subfolders whole."""
    left = {shard.path for shard in source.shards} | set(other_weights(source))
    for file in sorted(source.path.iterdir()):
        if file.is_dir():
            shutil.copytree(file, folder / file.name)
        elif file not in left:
            shutil.copy2(file, folder / file.name)


def other_weights(source: Checkpoint) -> list[Path]:
    """Files of a folder that look like weights or optimizer state and are no shard of the checkpoint."""
    shards = {shard.path for shard in source.shards}
    return sorted(p for p in source.path.iterdir() if p.is_file() and p.suffix in WEIGHTS and p not in shards)


def _names(file: Any) -> list[str]:
    return list(file.keys())


def _tensors(content: Any) -> dict[str, Tensor] | None:
    if not isinstance(content, Mapping):
        return None
    return {
        name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


def _load_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except Exception as error:  # torch's own advice, to load without the safety, is not passed on
        raise UserError(
            f"{path} cannot be read safely: it is damaged, or holds more than plain weights and would run code; "
            "save the weights alone, best as safetensors, and use that file"
        ) from error


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            yield file
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error
    except Exception as error:
        if type(error).__name__ != "SafetensorError":
            raise
        raise UserError(f"{path} cannot be read as safetensors: {error}") from error


_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
