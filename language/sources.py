"""Sources of text. Each yields training and validation documents, always in the same order."""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from fire_core.errors import UserError, first_line, shown
from language.text_tokenizer import ASSETS

DOCUMENT_SEPARATOR = "\n\f\n"  # in the shipped files
SHIPPED = ("encyclopaedic", "technical")
MADE = ("questions",)  # from shipped text
EXAMPLE = '; "'  # start of the examples of an entry
ANSWER = "\n"  # between question and answer of a document of `questions`, and nowhere else in it
HUB = {  # name -> repository, configuration
    "wikitext103": ("Salesforce/wikitext", "wikitext-103-v1"),
    "openwebtext": ("Skylion007/openwebtext", "plain_text"),
    "wikipedia": ("wikimedia/wikipedia", "20231101.en"),
}
WIKIPEDIA_ARTICLES = 5000  # the first long ones, about 100 MB; the rest is not downloaded
WIKIPEDIA_CHARACTERS = 2000  # least length of an article
WIKIPEDIA_VALIDATION = 100  # every hundredth article is validation
HUB_BRANCH = "refs/convert/parquet"  # has one folder of Parquet files for each configuration
HUB_VALIDATION = {"test_size": 0.0005, "seed": 2357, "shuffle": True}  # the split of the official code
# Number of training tokens with the official split, by source and tokenizer.
PUBLISHED_TOKENS = {("openwebtext", "gpt2"): 9_035_582_198}
PACKED = {".jsonl": open, ".jsonl.xz": lzma.open, ".jsonl.gz": gzip.open}
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}


@dataclass(frozen=True)
class Source:
    """A source of documents.

    name: of the prepared corpus. description: of the text, for the manifest. documents: part ("train" or "validation")
    -> iterator of texts, the same each time. validation_share, field, split: see `open_source`, None if they do not
    apply. answer: text between question and answer of a document, "" for plain documents.
    """

    name: str
    description: str
    documents: Callable[[str], Iterator[str]]
    validation_share: float | None = None
    field: str | None = None
    split: str | None = None
    answer: str = ""


def open_source(
    text: str, validation_share: float = 0.05, field: str = "text", split: str | None = None
) -> Source:
    """Return the source that `text` names. Raises UserError for an unknown name or a missing path.

    encyclopaedic, technical: shipped. questions: made from encyclopaedic, see `_questions`. wikitext103, openwebtext,
    wikipedia (5,000 articles): through `datasets`, with a network the first time.
    folder:PATH: every .txt file below PATH is a document. jsonl:PATH: `field` of every line is a document; PATH is a
    file (.jsonl, .jsonl.xz, .jsonl.gz) or a folder of them.
    In folders and JSONL, `validation_share` of the documents, chosen by the SHA-256 of their position, is validation.
    In JSONL the field `split` can replace the share: train, or validation (valid, val); other lines are skipped.
    """
    if text in MADE:
        return Source(text, "questions on the shipped encyclopaedic text", _questions, answer=ANSWER)
    if text in SHIPPED:
        return Source(text, f"shipped with the suite: {text}", partial(_shipped, text))
    if text in HUB:
        read = _wikipedia if text == "wikipedia" else partial(_hub, text)
        return Source(text, "/".join(HUB[text]), read)
    kind, _, place = text.partition(":")
    if kind not in ("folder", "jsonl") or not place:
        known = ", ".join((*SHIPPED, *MADE, *HUB, "folder:PATH", "jsonl:PATH"))
        raise UserError(f"text source {text!r} is not known: choose one of {known}")
    path = Path(place)
    if not path.exists():
        raise UserError(f"{shown(path)} does not exist: give the path of a text source")
    if kind == "folder" and not path.is_dir():
        raise UserError(f"{shown(path)} is not a folder: give the path of one, or write jsonl:{shown(path)}")
    if not 0.0 <= validation_share <= 1.0:
        raise UserError(f"validation share {validation_share}: give a part of the documents, between 0 and 1")

    def documents(part: str) -> Iterator[str]:
        if kind == "jsonl" and split is not None:
            rows = _jsonl(path, (field, split))
            yield from (document for document, share in rows if SPLITS.get(share) == part)
            return
        texts = _folder(path) if kind == "folder" else (row[0] for row in _jsonl(path, (field,)))
        for position, document in enumerate(texts):
            digest = hashlib.sha256(str(position).encode()).digest()
            is_validation = int.from_bytes(digest[:8], "big") < validation_share * 2**64
            if is_validation == (part == "validation"):
                yield document

    name = path.name
    for suffix in (".xz", ".gz", ".jsonl", ".txt"):
        name = name.removesuffix(suffix)
    own_field, own_split = (field, split) if kind == "jsonl" else (None, None)
    # An absolute path names the same text in every working directory.
    return Source(shown(name), f"{kind}:{path.resolve()}", documents, validation_share, own_field, own_split)


def _shipped(name: str, part: str) -> Iterator[str]:
    path = ASSETS / f"{name}.{part}.txt.xz"
    if not path.is_file():
        raise UserError(f"{path} is missing: check the repository out again")
    expected = json.loads((ASSETS / "manifest.json").read_text())[path.name]["sha256"]
    packed = path.read_bytes()
    if hashlib.sha256(packed).hexdigest() != expected:
        raise UserError(
            f"{path} is not the shipped file (its SHA-256 differs): check the repository out again"
        )
    yield from lzma.decompress(packed).decode().split(DOCUMENT_SEPARATOR)


def _questions(part: str) -> Iterator[str]:
    """Yield a question and its answer for each entry `name, other name: meaning; example` of the encyclopaedic text.

    The form is: What does "name" mean? <line break> meaning. Other names and quoted examples are left out.
    """
    for entry in _shipped("encyclopaedic", part):
        names, _, meaning = entry.partition(": ")
        yield f'What does "{names.partition(", ")[0]}" mean?{ANSWER}{meaning.partition(EXAMPLE)[0]}'


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files below a folder of texts, sorted. Raises UserError for none, and for one that is not regular."""
    found = sorted(path for path in folder.rglob("*") if path.name.endswith(suffixes))
    if not found:
        raise UserError(f"{shown(folder)} holds no {' or '.join(suffixes)} file")
    for path in found:
        if not path.is_file():
            raise UserError(f"{shown(path)} is not a regular file: remove or replace it")
    return found


def _folder(path: Path) -> Iterator[str]:
    for file in _files(path, (".txt",)):
        try:
            yield file.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError) as error:
            raise UserError(f"{shown(file)} is not UTF-8 text ({error}): convert or remove it") from error


def _jsonl(path: Path, fields: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the fields of each line of a file, or of the files of a folder."""
    for file in _files(path, tuple(PACKED)) if path.is_dir() else [path]:
        if not file.is_file():
            raise UserError(f"{shown(file)} is not a regular file: give a {' or '.join(PACKED)} file")
        opened = next((PACKED[suffix] for suffix in PACKED if file.name.endswith(suffix)), open)
        number = 0
        try:
            with opened(file, "rb") as lines:
                for number, line in enumerate(lines, 1):
                    yield _fields(line, fields, f"{shown(file)}, line {number}")
        except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
            raise UserError(
                f"{shown(file)} is damaged after line {number} ({first_line(error)}): replace it"
            ) from error


def _fields(line: bytes, fields: tuple[str, ...], where: str) -> tuple[str, ...]:
    try:
        row = json.loads(line.decode())
        values = tuple(row[field] for field in fields)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        names = " and ".join(map(repr, fields))
        raise UserError(f"{where}: no JSON object with the field {names}") from error
    for field, value in zip(fields, values, strict=True):
        if not isinstance(value, str):
            raise UserError(f"{where}: the field {field!r} is {value!r:.40}, not text")
    return values


def _hub(name: str, part: str) -> Iterator[str]:
    rows = _load_hub(*HUB[name]).train_test_split(**HUB_VALIDATION)
    for row in rows["train" if part == "train" else "test"]:
        if row["text"].strip():  # WikiText has a row for each blank line
            yield row["text"]


def _wikipedia(part: str) -> Iterator[str]:
    rows = _load_hub(*HUB["wikipedia"], streaming=True)
    texts = (row["text"] for row in rows if len(row["text"]) >= WIKIPEDIA_CHARACTERS)
    try:
        for position, text in enumerate(islice(texts, WIKIPEDIA_ARTICLES), 1):
            if (position % WIKIPEDIA_VALIDATION == 0) == (part == "validation"):
                yield text
    except (OSError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the connection to {HUB['wikipedia'][0]} broke ({first_line(error)}): run the same command again"
        ) from error


def _load_hub(repository: str, configuration: str, *, streaming: bool = False) -> Any:
    """Return the rows of the training split, from the main branch or, if that fails, from the branch of Parquet files.

    The main branch has named configurations. The Parquet branch, which the hub makes, has a folder for each instead.
    """
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(
            f"{repository} needs the package datasets: pip install -e '.[language-data]'"
        ) from error
    failures = []
    for choice in ({"name": configuration}, {"data_dir": configuration, "revision": HUB_BRANCH}):
        try:
            return load_dataset(repository, split="train", streaming=streaming, **choice)
        except (OSError, ValueError, RuntimeError) as error:
            failures.append(f"{choice.get('revision', 'main')}: {first_line(error)}")
    raise UserError(
        f"cannot load {repository} ({'; '.join(failures)}); with no network use folder:PATH or jsonl:PATH"
    )
