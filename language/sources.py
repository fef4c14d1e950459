"""Sources of text. Each yields training and validation documents, always in the same order."""

import gzip
import hashlib
import json
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
HUB_BRANCH = "refs/convert/parquet"  # has one folder of Parquet files for each configuration
HUB_VALIDATION = {"test_size": 0.0005, "seed": 2357, "shuffle": True}  # the split of the official code
WIKIPEDIA_ARTICLES = 5000  # the first long ones, about 100 MB; the rest is not downloaded
WIKIPEDIA_CHARACTERS = 2000  # least length of an article
WIKIPEDIA_VALIDATION = 100  # every hundredth article is validation
# Number of training tokens with the official split, by source and tokenizer.
PUBLISHED_TOKENS = {("openwebtext", "gpt2"): 9_035_582_198}
PACKED = {".xz": lzma.open, ".gz": gzip.open}
SPLITS = {"train": "train", "validation": "validation", "valid": "validation", "val": "validation"}


@dataclass(frozen=True)
class Source:
    """A source of documents.

    name: of the prepared corpus. documents: part ("train" or "validation") -> iterator of texts, the same each time.
    origin: what determines them, for the manifest. answer: text between question and answer of a document, or "".
    """

    name: str
    documents: Callable[[str], Iterator[str]]
    origin: dict[str, Any] = field(default_factory=dict)
    answer: str = ""


def open_source(
    text: str, validation_share: float = 0.05, field: str = "text", split: str | None = None
) -> Source:
    """Return the source that `text` names. Raises UserError for an unknown name or a missing path.

    encyclopaedic, technical: shipped. questions: made from encyclopaedic, see `_questions`. wikitext103, openwebtext,
    wikipedia (5,000 articles): through `datasets`, with a network the first time.
    folder:PATH: every .txt file below PATH is a document. jsonl:PATH: `field` of every line of a file (.jsonl, .jsonl.xz,
    .jsonl.gz) is one. In both, `validation_share` of the documents, by the SHA-256 of their position, is validation. In
    JSONL the field `split` can replace the share: train, or validation (valid, val); other lines are skipped.
    """
    if text in MADE:
        return Source(text, _questions, {"source": "questions on the shipped encyclopaedic text"}, ANSWER)
    if text in SHIPPED:
        return Source(text, partial(_shipped, text), {"source": f"shipped with the suite: {text}"})
    if text in HUB:
        read = _wikipedia if text == "wikipedia" else partial(_hub, text)
        return Source(text, read, {"source": "/".join(HUB[text])})
    kind, _, place = text.partition(":")
    path = Path(place)
    if kind not in ("folder", "jsonl") or not (path.is_dir() if kind == "folder" else path.is_file()):
        known = ", ".join((*SHIPPED, *MADE, *HUB, "folder:PATH", "jsonl:FILE"))
        raise UserError(f"text source {shown(text)!r} does not exist: choose one of {known}")

    def documents(part: str) -> Iterator[str]:
        texts = _jsonl(path, field, split) if kind == "jsonl" else _folder(path)
        for position, (document, own) in enumerate(texts):
            digest = hashlib.sha256(str(position).encode()).digest()
            chosen = int.from_bytes(digest[:8], "big") < validation_share * 2**64
            if part == (SPLITS.get(str(own)) if split else "validation" if chosen else "train"):
                yield document

    name = path.absolute().name
    for suffix in (".xz", ".gz", ".jsonl", ".txt"):
        name = name.removesuffix(suffix)
    # An absolute path names the same text in every working directory.
    origin = {"source": f"{kind}:{path.resolve()}", "validation_share": validation_share}
    return Source(name, documents, origin | ({"field": field, "split": split} if kind == "jsonl" else {}))


def _shipped(name: str, part: str) -> Iterator[str]:
    with lzma.open(ASSETS / f"{name}.{part}.txt.xz") as file:
        yield from file.read().decode().split(DOCUMENT_SEPARATOR)


def _questions(part: str) -> Iterator[str]:
    """Yield `What does "name" mean?`, a line break and the meaning for each entry `name, other name: meaning; example`."""
    for entry in _shipped("encyclopaedic", part):
        names, _, meaning = entry.partition(": ")
        yield f'What does "{names.partition(", ")[0]}" mean?{ANSWER}{meaning.partition(EXAMPLE)[0]}'


def _folder(path: Path) -> Iterator[tuple[str, None]]:
    for file in sorted(path.rglob("*.txt")):
        try:
            yield file.read_text(encoding="utf-8"), None
        except UnicodeDecodeError as error:
            raise UserError(f"{shown(file)} is not UTF-8 text ({error}): convert or remove it") from error


def _jsonl(path: Path, field: str, split: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the field `field` of each line of a file, with the field `split` if it is given."""
    with PACKED.get(path.suffix, open)(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                text, own = row[field], row[split] if split else None
                text.encode()  # raises if it is not text, or a part of a character
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                names = " and ".join(repr(name) for name in (field, split) if name)
                wrong = f"{shown(path)}, line {number}: no JSON object with the text {names}"
                raise UserError(f"{wrong} ({error})") from error
            yield text, own


def _hub(name: str, part: str) -> Iterator[str]:
    rows = _load_hub(*HUB[name]).train_test_split(**HUB_VALIDATION)
    for row in rows["train" if part == "train" else "test"]:
        if row["text"].strip():  # WikiText has a row for each blank line
            yield row["text"]


def _wikipedia(part: str) -> Iterator[str]:
    rows = _load_hub(*HUB["wikipedia"], streaming=True)
    texts = (row["text"] for row in rows if len(row["text"]) >= WIKIPEDIA_CHARACTERS)
    for position, text in enumerate(islice(texts, WIKIPEDIA_ARTICLES), 1):
        if (position % WIKIPEDIA_VALIDATION == 0) == (part == "validation"):
            yield text


def _load_hub(repository: str, configuration: str, *, streaming: bool = False) -> Any:
    """Return the rows of the training split: of a named configuration of the main branch, else of its Parquet folder."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError(f"{repository} needs the package datasets: make install-language") from error
    failures = []
    for choice in ({"name": configuration}, {"data_dir": configuration, "revision": HUB_BRANCH}):
        try:
            return load_dataset(repository, split="train", streaming=streaming, **choice)
        except (OSError, ValueError, RuntimeError) as error:
            failures.append(f"{choice.get('revision', 'main')}: {first_line(error)}")
    remedy = "with no network use folder:PATH or jsonl:FILE"
    raise UserError(f"cannot load {repository} ({'; '.join(failures)}); {remedy}")
