"""Weights on disk: one safetensors or torch file, or a Hugging Face folder of shards, read one shard at a time.

Torch files are opened with weights-only loading: a file that would run code is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fire_core.errors import UserError
from fire_core.files import written_aside
from fire_core.targets.table import shorten

INDICES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
SOURCES = ("model.safetensors", INDICES[0], "pytorch_model.bin", INDICES[1])  # in the order of transformers
WEIGHTS = tuple([".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".npz"])
WRITER = ("inline_container", "PytorchStreamWriter")  # what writes files for torch.save
MOST_LEVELS = 200  # of a name: modules are nested, and Python nests about a thousand calls
STATE_KEYS = ("model", "state_dict", "model_state_dict", "module", "network", "net", "nets")


@dataclass
class Shard:
    """One file of weights. key: dotted path to the weights in a torch file. metadata: of a loaded safetensors file."""

    path: Path
    key: str | None = None
    metadata: dict[str, str] | None = field(default=None, repr=False)

    @property
    def safe(self) -> bool:
        """Whether the file has the safetensors format, by its suffix."""
        return self.path.suffix == ".safetensors"

    def outline(self) -> dict[str, Tensor]:
        """Return the tensors by name, without values (meta device) for safetensors; for torch files, as `load` does."""
        tensors = self.load()[0]
        return {name: tensor.to("meta") for name, tensor in tensors.items()} if self.safe else tensors

    def load(self) -> tuple[dict[str, Tensor], Any]:
        """Return the tensors by name and, for `save`, the whole content of a torch file (else None)."""
        if self.safe:
            try:
                with safe_open(self.path, framework="pt", device="cpu") as file:
                    self.metadata = file.metadata()
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                raise UserError(f"{self.path} cannot be read as safetensors: {error}") from error
            for name in tensors:
                _check_name(name, self.path)
            return tensors, None
        content = load_torch(self.path)
        return state_dict_of(content, self.key, self.path), content

    def save(self, path: Path, tensors: Mapping[str, Tensor], content: Any) -> None:
        """Write `tensors`, which must have been changed in place since `load`, with the rest of the file's content."""
        if self.safe:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, self.metadata)
        else:
            with path.open("wb") as file:  # given a path, torch would write that name into the file
                torch.save(content, file)


@dataclass
class Checkpoint:
    """A file of weights, or a folder with shards, their index and other files (configuration, tokenizer).

    index: tensor -> name of its shard, as `index_file` of a folder tells it.
    """

    path: Path
    shards: list[Shard]
    index: dict[str, str] = field(default_factory=dict, repr=False)
    index_file: Path | None = None

    @property
    def is_folder(self) -> bool:
        """Whether the checkpoint is a folder of shards."""
        return self.path.is_dir()

    @property
    def config(self) -> Path | None:
        """The config.json of the folder, also if its only file of weights was given; None if there is none."""
        folder = self.path if self.is_folder else self.path.parent
        known = self.is_folder or self.path.name in SOURCES
        return folder / "config.json" if known and (folder / "config.json").is_file() else None

    def outline(self) -> dict[str, Tensor]:
        """Return the tensors of all shards by name, as `Shard.outline` does. Raises UserError if the index has more."""
        found = {name: tensor for shard in self.shards for name, tensor in shard.outline().items()}
        missing = [name for name in self.index if name not in found]
        if missing:
            raise UserError(
                f"{self.path} lacks tensors that its index names ({shorten(missing, 3)}): fetch it again"
            )
        return found

    def other_files(self) -> tuple[list[Path], list[Path]]:
        """Return the files of a folder, at any depth, that are no shards: those to copy, and those not to copy.

        Not copied are files that may hold old weights (other weight files, optimizer state, their indices), hidden
        folders, and what is no file. Links are followed only within the folder, or to the blobs of a Hugging Face cache:
        a folder from elsewhere could link to a private file.
        """
        if not self.is_folder:
            return [], []
        shards = {shard.path for shard in self.shards}
        home = self.path.resolve()
        root = home.parents[1] if home.parent.name == "snapshots" else home
        kept: list[Path] = []
        left: list[Path] = []
        for file in sorted(self.path.rglob("*")):
            if file in shards or (file.is_dir() and not file.is_symlink()):
                continue
            parts = file.relative_to(self.path).parts
            hidden = any(part.startswith(".") for part in parts[:-1])
            old = file.suffix in WEIGHTS or (file.name in INDICES and file != self.index_file)
            inside = file.is_file() and Path(os.path.realpath(file)).is_relative_to(root)
            (kept if inside and not hidden and not old else left).append(file)
        return kept, left


def open_checkpoint(path: str | Path, key: str | None = None) -> Checkpoint:
    """Return the checkpoint at `path`, with its shards not yet read.

    key: dotted path to the weights inside a torch file. Raises UserError if there are no weights in a known form.
    """
    path = Path(path)
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError) as error:
        reason = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read ({error})"
        raise UserError(f"checkpoint {str(path)[:200]!r} {reason[:200]}") from error
    if key is not None and path.suffix == ".safetensors":
        raise UserError(
            f"key {key!r} is for torch files, and {str(path)!r} is a safetensors file: leave it out"
        )
    if path.name in INDICES:
        raise UserError(
            f"{str(path)!r} is the index of a sharded checkpoint: name its folder, {str(path.parent)!r}"
        )
    if stat.S_ISREG(mode):
        return Checkpoint(path, [Shard(path, key)])
    if not stat.S_ISDIR(mode):
        raise UserError(f"{str(path)!r} is neither a file nor a folder: name a checkpoint")
    for name in SOURCES:
        if not (path / name).is_file():
            continue
        if name not in INDICES:
            return Checkpoint(path, [Shard(path / name, key)])
        index = _read_index(path / name)
        files = sorted(set(index.values()))
        missing = [file for file in files if Path(file).name != file or not (path / file).is_file()]
        if missing:
            raise UserError(
                f"{path / name} names {missing[:5]}, which are not files of the folder: fetch them first"
            )
        return Checkpoint(path, [Shard(path / file, key) for file in files], index, path / name)
    raise UserError(f"folder {str(path)!r} holds none of {', '.join(SOURCES)}: name a file in it")


def _read_index(path: Path) -> dict[str, str]:
    """Return the weight_map of a Hugging Face index file: tensor -> name of its shard."""
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not index or not all(isinstance(name, str) for name in index.values()):
            raise ValueError("its weight_map names no files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{path} is not an index of shards ({type(error).__name__}: {error}): fetch it again"
        ) from error
    return index


def load_torch(path: Path) -> Any:
    """Return what `torch.save` wrote, on the CPU and mapped; raise UserError if it is damaged or unsafe.

    torch.load checks no checksum and maps compressed records as if they were not, so both are checked here.
    """
    try:
        mapped = zipfile.is_zipfile(path)
        if mapped:
            with zipfile.ZipFile(path) as archive:
                if any(record.compress_type != zipfile.ZIP_STORED for record in archive.infolist()):
                    raise UserError(
                        f"{path} is compressed, which torch.save never does: save the weights again"
                    )
                damaged = archive.testzip()
            if damaged is not None:
                raise UserError(
                    f"{path} is damaged: record {damaged!r} does not have its checksum; fetch or save it again"
                )
        return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    except Exception as error:  # torch's message advises to load without the safety
        raise UserError(
            f"{path} cannot be read safely: it is damaged, or holds more than plain weights and would run code; "
            "save the weights alone, best as safetensors, and use that file"
        ) from error


def state_dict_of(content: Any, key: str | None, path: Path) -> dict[str, Tensor]:
    """Return the tensors by name in the content of a torch file.

    They are in the entry `key` if given, else in the first of the usual entries that holds tensors, else in the content
    itself. Raises UserError if there are none, for unprintable names, and for meta or sparse tensors.
    """
    if key is not None:
        for word in key.split("."):
            if not isinstance(content, Mapping) or word not in content:
                raise UserError(f"{path} has no {word!r} of key {key!r}; it holds {_seen(content)}")
            content = content[word]
        found = _tensors(content)
    else:
        inner = [content[name] for name in STATE_KEYS if isinstance(content, Mapping) and name in content]
        found = next((tensors for tensors in map(_tensors, [*inner, content]) if tensors), None)
    if not found:
        raise UserError(
            f"{path} contains no named tensors (it contains {_seen(content)}): give the entry with --key"
        )
    for name, tensor in found.items():
        _check_name(name, path)
        if tensor.is_meta or tensor.is_nested or tensor.layout != torch.strided:
            kind = "on the meta device, without values" if tensor.is_meta else "sparse or nested"
            raise UserError(f"{path}: tensor {name!r} is {kind}; save it as an ordinary dense tensor first")
    return found


@contextmanager
def new_checkpoint(target: Path, like: Checkpoint) -> Iterator[Path]:
    """Yield a temporary path beside `target`, a new folder if `like` is one, and rename it if the body raises no error.

    Raises UserError if `target` exists, has another suffix than `like`, lies in its folder, or cannot be written.
    """
    if os.path.lexists(target):
        raise UserError(f"{str(target)!r} exists and is not overwritten: name another output, or remove it")
    if not like.is_folder and target.suffix != like.path.suffix:
        raise UserError(
            f"{str(target)!r} should end in {like.path.suffix!r} like {like.path.name!r}: the format stays the same"
        )
    if like.is_folder and target.absolute().is_relative_to(like.path.absolute()):
        raise UserError(f"{str(target)!r} lies inside {str(like.path)!r}: name an output beside it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no folder for {str(target)!r} can be made ({error}): name another output"
        ) from error
    try:
        with written_aside(target) as aside:
            if like.is_folder:
                aside.mkdir()
            yield aside
            if os.path.lexists(target):
                raise UserError(f"{str(target)!r} appeared while writing and is not overwritten")
    except (OSError, RuntimeError, SafetensorError) as error:
        # torch.save reports a failed write as a RuntimeError of its archive writer
        if isinstance(error, RuntimeError) and not any(word in str(error) for word in WRITER):
            raise
        free = shutil.disk_usage(target.parent).free / 1e6
        raise UserError(
            f"{str(target)!r} cannot be written ({str(error).splitlines()[0]}; {free:,.0f} MB of disk are free): "
            "nothing was left behind; free space or name another output"
        ) from error


def copy_others(source: Checkpoint, folder: Path) -> None:
    """Copy the files of a `source` folder that are not weights to `folder` (see `Checkpoint.other_files`)."""
    for file in source.other_files()[0]:
        copy = folder / file.relative_to(source.path)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, copy)


def _check_name(name: str, path: Path) -> None:
    """Raise UserError for a name that could control the terminal when it is printed, or that is nested too deep."""
    if name.count(".") > MOST_LEVELS:
        raise UserError(
            f"{path} has a tensor {name[:40]!r}... {name.count('.')} levels deep: at most {MOST_LEVELS}"
        )
    if not name.isprintable():
        raise UserError(
            f"{path} has a tensor named {name!r}, which cannot be printed: rename it, if you trust the file"
        )


def _seen(content: Any) -> str:
    return str(list(content)[:8]) if isinstance(content, Mapping) else f"a {type(content).__name__}"


def _tensors(content: Any) -> dict[str, Tensor] | None:
    if not isinstance(content, Mapping):
        return None
    return {
        name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)
    }
