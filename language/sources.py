"""Where text comes from: each source gives training and validation documents, one after the other, always in one order."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fire_core.errors import UserError
from language.build_corpora import ASSETS, DOCUMENT_SEPARATOR

SHIPPED = ("encyclopaedic", "technical")
HUB = {  # name -> repository, configuration; read from the branch that holds plain Parquet files
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-v1"),
    "openwebtext": ("Skylion007/openwebtext", "plain_text"),
}
KINDS = ("folder", "jsonl")  # of text that the user brings, written KIND:PATH
HUB_BRANCH = "refs/convert/parquet"
HUB_VALIDATION = {"test_size": 0.0005, "seed": 2357, "shuffle": True}  # the split of the official code


@dataclass(frozen=True)
class Source:
    """name: of the prepared corpus. documents: part ("train" or "validation") -> iterator of texts, same each time.

    validation_share, field: where the user chooses them, else None.
    """

    name: str
    description: str
    documents: Callable[[str], Iterator[str]]
    validation_share: float | None = None
    field: str | None = None


def open_source(text: str, validation_share: float = 0.05, field: str = "text") -> Source:
    """The source that a command line names.

    encyclopaedic, technical: shipped. wikitext103, openwebtext: through `datasets`, needs a network the first time.
    folder:PATH: every .txt file below PATH is a document. jsonl:PATH: `field` of every line is one.
    Of folders and JSONL, `validation_share` of the documents, picked by the SHA-256 of their position, is validation.
    """
    if text in SHIPPED:
        return Source(text, f"shipped with the suite: {text}", lambda part: _shipped(text, part))
    if text in HUB:
        return Source(text, "/".join(HUB[text]), lambda part: _hub(text, part))
    kind, _, place = text.partition(":")
    readers = {"folder": _folder, "jsonl": _jsonl}
    if kind not in KINDS or not place:
        known = ", ".join((*SHIPPED, *HUB, "folder:PATH", "jsonl:PATH"))
        raise UserError(f"text source {text!r} is not known: choose one of {known}")
    _check_place(kind, Path(place))
    if not 0.0 <= validation_share <= 1.0:
        raise UserError(f"validation share {validation_share}: give a part of the documents, between 0 and 1")
    read = readers[kind]

    def documents(part: str) -> Iterator[str]:
        for position, document in enumerate(read(Path(place), field)):
            digest = hashlib.sha256(str(position).encode()).digest()
            is_validation = int.from_bytes(digest[:8], "big") < validation_share * 2**64
            if is_validation == (part == "validation"):
                yield document

    return Source(
        Path(place).stem, absolute(text), documents, validation_share, field if kind == "jsonl" else None
    )


def absolute(description: str) -> str:
    """The same description with a whole path, so that it means one text wherever the command is typed."""
    kind, _, place = description.partition(":")
    return f"{kind}:{Path(place).resolve()}" if kind in KINDS else description


def _check_place(kind: str, path: Path) -> None:
    wanted = "a folder" if kind == "folder" else "a file"
    if not path.exists():
        raise UserError(f"{path} does not exist: give the path of {wanted}")
    if path.is_dir() != (kind == "folder"):
        other = "folder" if path.is_dir() else "jsonl"
        raise UserError(f"{kind}:{path} is not {wanted}: give the path of one, or write {other}:{path}")


def _shipped(name: str, part: str) -> Iterator[str]:
    path = ASSETS / f"{name}.{part}.txt.xz"
    if not path.is_file():
        raise UserError(
            f"{path} is missing: check the repository out again, or run language/build_corpora.py"
        )
    expected = json.loads((ASSETS / "manifest.json").read_text())[path.name]["sha256"]
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() != expected:
        raise UserError(
            f"{path} is not the shipped file (its SHA-256 differs): check the repository out again"
        )
    yield from lzma.decompress(packed).decode().split(DOCUMENT_SEPARATOR)


def _folder(path: Path, field: str) -> Iterator[str]:
    files = sorted(path.rglob("*.txt"))
    if not files:
        raise UserError(f"{path} holds no .txt file")
    for file in files:
        try:
            yield file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{file} is not UTF-8 text ({error}): convert or remove it") from error


def _jsonl(path: Path, field: str) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                text = json.loads(line.decode())[field]
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{path}, line {number}: no JSON object with the field {field!r}") from error
            if not isinstance(text, str):
                raise UserError(f"{path}, line {number}: the field {field!r} is {text!r:.40}, not text")
            yield text


def _hub(name: str, part: str) -> Iterator[str]:
    repository, configuration = HUB[name]
    rows = _load_hub(repository, configuration).train_test_split(**HUB_VALIDATION)
    for row in rows["train" if part == "train" else "test"]:
        if row["text"].strip():  # WikiText has a row for each blank line
            yield row["text"]


def _load_hub(repository: str, configuration: str) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"{repository} needs the package datasets: pip install -e '.[language-data]'"
        ) from error
    try:
        return load_dataset(repository, configuration, split="train", revision=HUB_BRANCH)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0][:160]
        raise UserError(
            f"cannot load {repository} ({reason}); with no network use folder:PATH or jsonl:PATH"
        ) from error
