"""Token files and the batches drawn from them, each a pure function of (seed, phase, iteration, micro-batch).

A resumed run needs only its iteration, and the micro-batches are the same for any number of processes.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fire_core.errors import UserError
from harness.runs import generator

PARTS = ("train", "validation")
IGNORED = -100  # value of targets that the loss ignores
Batch = tuple[Tensor, Tensor]  # inputs and targets, each (windows, block) int64


@dataclass(frozen=True)
class Corpus:
    """The two token files of one corpus. `train` and `validation` are one-dimensional memory maps of token ids.

    answers: {part: (tokens,) bool}, the tokens that count if documents are questions with answers; empty: all.
    """

    name: str
    train: np.ndarray
    validation: np.ndarray
    manifest: dict[str, Any]
    answers: dict[str, np.ndarray] = field(default_factory=dict)


def open_corpus(folder: Path, *, block: int, vocabulary: int, train_tokens: int | None = None) -> Corpus:
    """Return the corpus that `language/prepare.py` wrote to `folder`.

    train_tokens: use only this many tokens for training, the first ones (None: all).
    Raises UserError for a missing folder, a damaged manifest, files of another length, a tokenizer with more ids than
    `vocabulary`, too few `train_tokens`, and a part without one full window of `block` + 1 tokens.
    """
    manifest = read_manifest(folder)
    known = manifest["tokenizer"]["vocabulary"]
    if known > vocabulary:
        wrong = f"{folder} has a tokenizer of {known} ids, but the model has vocabulary={vocabulary}"
        raise UserError(f"{wrong}: raise model.vocabulary, or prepare the corpus with another --tokenizer")
    parts = {}
    for part in PARTS:
        file, kind = folder / f"{part}.bin", np.dtype(manifest["dtype"])
        size = file.stat().st_size if file.is_file() else 0
        tokens = np.zeros(0, kind) if not size or size % kind.itemsize else np.memmap(file, kind, mode="r")
        if len(tokens) != (wanted := manifest["parts"][part]["tokens"]):
            wrong = f"{folder}/{part}.bin has {len(tokens)} tokens, its manifest says {wanted}"
            raise UserError(f"{wrong}: delete {folder} and prepare the corpus again")
        limit = train_tokens if part == "train" else None
        parts[part] = tokens[:limit]
        if len(parts[part]) < max(block + 1, limit or 0):
            wrong = f"{folder}/{part}.bin gives {len(parts[part])} tokens, too few for {block=} or {train_tokens=}"
            raise UserError(f"{wrong}: use a longer text, a smaller block, or a larger limit")
    answers = {}
    if manifest.get("answer") is not None:
        ids = manifest["answer"], manifest["tokenizer"]["end_of_text"]
        answers = {part: in_answers(tokens, *ids) for part, tokens in parts.items()}
    return Corpus(manifest["name"], parts["train"], parts["validation"], manifest, answers)


def in_answers(tokens: np.ndarray, answer: int, end_of_text: int) -> np.ndarray:
    """Return (tokens,) bool: True from behind the id `answer` up to the end-of-text id of its document, inclusive."""
    ends = np.append(np.flatnonzero((tokens == answer) | (tokens == end_of_text)), len(tokens) - 1)
    return np.asarray(tokens[ends[np.searchsorted(ends[:-1], np.arange(len(tokens)))]] == end_of_text)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the manifest of a prepared folder. Raises UserError if it is missing, no JSON, or lacks an entry."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        if lacking := {"name", "dtype", "tokenizer", "parts", "made_from"} - set(manifest):
            raise ValueError(f"its manifest lacks {min(lacking)!r}")
        return manifest
    except (OSError, ValueError) as error:
        remedy = "make it with python language/prepare.py (see --help)"
        raise UserError(f"no prepared corpus in {folder} ({error}): {remedy}") from error


@dataclass(frozen=True)
class Mixture:
    """The training batches of a phase. Each micro-batch is drawn from one corpus, chosen with probability `shares`."""

    corpora: tuple[Corpus, ...]
    shares: tuple[float, ...]  # probability of each corpus; sums to 1
    block: int
    batch_size: int
    seed: int
    phase: int

    @property
    def tokens(self) -> int:
        """Number of training tokens of all corpora with a positive share, which is one pass."""
        return sum(len(c.train) for c, share in zip(self.corpora, self.shares, strict=True) if share > 0)

    def batch(self, iteration: int, micro: int) -> Batch:
        """Return inputs and targets (batch_size, block), int64 on the CPU, from windows at random offsets.

        Targets that the loss ignores are IGNORED.
        """
        random = generator(self.seed, "data", self.phase, iteration, micro)
        position = float(torch.rand((), generator=random, dtype=torch.float64))
        chosen = int(np.searchsorted(np.cumsum(self.shares), position, side="right"))
        corpus = self.corpora[min(chosen, len(self.corpora) - 1)]
        starts = torch.randint(len(corpus.train) - self.block, (self.batch_size,), generator=random)
        return _windows(corpus, "train", starts.tolist(), self.block)


def validation_batches(corpus: Corpus, block: int, batch_size: int, limit: int) -> Iterator[Batch]:
    """Yield inputs and targets (up to batch_size, block) of the first `limit` validation windows, in order."""
    starts = list(range(0, len(corpus.validation) - block, block))[:limit]
    for first in range(0, len(starts), batch_size):
        yield _windows(corpus, "validation", starts[first : first + batch_size], block)


def _windows(corpus: Corpus, part: str, starts: list[int], block: int) -> Batch:
    def cut(row: np.ndarray) -> Tensor:
        return torch.from_numpy(np.stack([row[start : start + block + 1] for start in starts]))

    windows = cut(getattr(corpus, part)).long()
    inputs, targets = windows[:, :-1], windows[:, 1:]
    if part in corpus.answers:
        targets = torch.where(cut(corpus.answers[part])[:, 1:], targets, IGNORED)
    return inputs, targets
