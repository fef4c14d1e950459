"""The two phases of a language run: data, length, learning rate, evaluations and named checkpoints."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from fire_core.errors import UserError
from harness.device import send
from harness.trial import part_of, seed_of
from language.data import Corpus, Mixture, open_corpus
from language.distributed import World
from language.prepare import folder_name, prepare
from language.sources import MADE, SHIPPED, open_source


@dataclass(frozen=True)
class PhasePlan:
    """One phase. iterations: length of its schedule. stop_at: iterations trained. eval_every, save_at: its settings."""

    index: int
    name: str
    mixture: Mixture
    iterations: int
    stop_at: int
    eval_every: int
    save_at: tuple[int, ...]
    cfg: DictConfig  # of the run

    def rate(self, iteration: int) -> float:
        """Return the learning rate: a linear rise, then half a cosine down to the final rate at `iterations`."""
        high, low = self.cfg.learning_rate, self.cfg.final_learning_rate
        warmup = min(int(self.cfg.warmup_share * self.iterations), self.cfg.warmup_limit)
        if iteration < warmup:
            return high * (iteration + 1) / (warmup + 1)
        done = (iteration - warmup) / max(1, self.iterations - warmup)
        return low + 0.5 * (1 + math.cos(math.pi * min(1.0, done))) * (high - low)

    def batch(self, iteration: int, micro: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of one micro-batch on `device`."""
        inputs, targets = self.mixture.batch(iteration, micro)
        return send(inputs, device), send(targets, device)

    def coming(self, count: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the first micro-batch of each of the first `count` iterations, for methods that use the coming data."""
        return (self.batch(iteration, 0, device) for iteration in range(count))


def open_corpora(cfg: DictConfig, world: World) -> tuple[Corpus, Corpus]:
    """Return corpora A and B of the config. Shipped text is prepared on first use (seconds), other text beforehand.

    Process 0 goes first. Raises UserError if a corpus is missing or damaged, or if the two have different tokenizers.
    """
    if not world.is_leader:
        world.from_leader(None)
    root, made = Path(cfg.run.data_root) / "language", (cfg.corpus.tokenizer, cfg.corpus.documents)
    opened, sizes = [], {"block": cfg.model.block, "vocabulary": cfg.model.vocabulary}
    for entry in (cfg.corpus.a, cfg.corpus.b):
        folder = Path(entry.folder or root / folder_name(entry.name, *made))
        if entry.folder is None and entry.name in (*SHIPPED, *MADE):
            prepare(open_source(entry.name), made[0], root, documents=made[1], progress=False)
        opened.append(open_corpus(folder, **sizes, train_tokens=entry.train_tokens))
    if world.is_leader:
        world.from_leader(None)
    a, b = opened
    if len({corpus.manifest["made_from"]["tokenizer_sha256"] for corpus in opened}) > 1:
        names = ", ".join(corpus.manifest["tokenizer"]["name"] for corpus in opened)
        raise UserError(f"corpora A and B have different tokenizers ({names}): prepare both again, with one")
    return a, b


def phase_plans(cfg: DictConfig, corpora: tuple[Corpus, Corpus]) -> list[PhasePlan]:
    """Return the two phases of a config that `check_settings` accepted: `iterations` long, or `passes` over their tokens.

    Raises UserError for a phase of no iteration, `save_at` beyond its end, and a `boundary.fork` that phase 1 does not keep.
    """
    plans = []
    for index, key in enumerate(("phase_1", "phase_2")):
        entry = cfg[key]
        block, shares = entry.block or cfg.model.block, (entry.share_a, 1.0 - entry.share_a)
        mixed = Mixture(corpora, shares, block, cfg.batch_size, seed_of(cfg, index), index)
        per_iteration = cfg.accumulation * cfg.batch_size * block
        iterations = entry.iterations or int(entry.passes * mixed.tokens / per_iteration)
        stop_at = min(entry.stop_at or iterations, iterations)
        stop_at = stop_at if index == 0 else part_of(cfg, stop_at)
        if stop_at < 1:
            wrong = f"{entry.passes} passes over {mixed.tokens} tokens"
            raise UserError(f"{key}: {wrong} are not one iteration of {per_iteration}")
        save_at = tuple(entry.save_at or ())
        if any(iteration > stop_at for iteration in save_at):
            raise UserError(f"{key}.save_at={list(save_at)}: the phase ends at iteration {stop_at}")
        eval_every = entry.eval_every or max(1, min(2000, iterations // 20))
        plans.append(PhasePlan(index, key, mixed, iterations, stop_at, eval_every, save_at, cfg))
    fork, known = str(cfg.boundary.fork), ("best", "last", *map(str, plans[0].save_at))
    if fork not in known:
        raise UserError(f"boundary.fork={fork}: phase_1 keeps {', '.join(known)}; add it to phase_1.save_at")
    return plans


def describe(plans: list[PhasePlan]) -> str:
    """Return the sizes of corpora and phases as one line."""
    texts = ", ".join(f"{c.name} {len(c.train):,} tokens" for c in plans[0].mixture.corpora)
    return f"{texts}; " + ", ".join(f"{p.name} {p.stop_at:,} of {p.iterations:,} iterations" for p in plans)
