"""The work of a run: images, tokens or steps, disk and memory, computed from its config alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig

from harness.config import CONF

# An evaluated image, token or step counts as a third of a trained one, because it has no backward pass.
EVALUATION = 1 / 3
UNITS = {"vision": "images", "language": "tokens", "dqn": "steps", "sac": "steps"}
# Bytes per weight in a checkpoint to resume from (the weight and Adam's two averages) and in the final one.
RESUMABLE, STORED = 12, 4


@dataclass(frozen=True)
class Work:
    """The work of one run, in the units of its domain (images, tokens or steps). Sizes are in bytes.

    trunk, fork: units trained before and after the first boundary. trunk_tests, fork_tests: units evaluated meanwhile.
    operations: floating point operations of training on one unit, None if unknown. per_step: units per step, where a
    step is what the names of checkpoints count. trunk_bytes: disk of the shared phase 0. running_bytes: disk of the
    run's folder during training. left_bytes: disk of that folder afterwards. memory: main memory of the process.
    trunk_memory: main memory that all runs of one trunk share.
    """

    trunk: int
    fork: int
    trunk_tests: int
    fork_tests: int
    operations: float | None
    precision: str
    compile: bool
    per_step: int
    trunk_bytes: int
    running_bytes: int
    left_bytes: int
    memory: int
    trunk_memory: int = 0

    @property
    def trunk_units(self) -> float:
        """Units before the first boundary, with evaluated ones at EVALUATION."""
        return self.trunk + EVALUATION * self.trunk_tests

    @property
    def fork_units(self) -> float:
        """Units after the first boundary, with evaluated ones at EVALUATION."""
        return self.fork + EVALUATION * self.fork_tests


@functools.cache
def assumed() -> dict[str, Any]:
    """Return conf/campaign/assumed.yaml: what a plan assumes where nothing was measured."""
    return yaml.safe_load((CONF / "campaign" / "assumed.yaml").read_text())


def work_of(cfg: DictConfig) -> Work:
    """Return the work of the run of this config."""
    return {"vision": vision, "language": language, "dqn": dqn, "sac": sac}[cfg.domain](cfg)


def vision(cfg: DictConfig) -> Work:
    """Return the work of a vision run: images times epochs, over the phases of vision/protocols.py."""
    known = assumed()
    train, test = known["images"].get(cfg.data.name, (0, 0))
    everything = known["classes"].get(cfg.data.name, 0)
    classes = min(cfg.data.classes or everything, everything)
    train, test = (count * classes // max(1, everything) for count in (train, test))
    train = min(train, classes * cfg.data.train_per_class) if cfg.data.train_per_class else train
    test = min(test, classes * cfg.data.test_per_class) if cfg.data.test_per_class else test
    stages = stages_of(dict(cfg.protocol), train, classes)
    trained = [images * epochs for images, epochs in stages]
    tested = [test * math.ceil(epochs / cfg.eval_every) for _, epochs in stages]
    net = known["nets"].get(f"{cfg.model.name}/{cfg.data.name}", {}) if cfg.size == "paper" else {}
    weights = net.get("parameters", 0)
    return Work(
        trained[0],
        sum(trained[1:]),
        tested[0],
        sum(tested[1:]),
        operations=3e9 * net["gflop"] if net else None,
        precision=cfg.precision,
        compile=cfg.compile,
        per_step=cfg.batch_size,
        trunk_bytes=RESUMABLE * weights,
        running_bytes=(cfg.run.keep + 1) * RESUMABLE * weights,
        left_bytes=STORED * weights,
        memory=gigabytes("memory_gb", "vision"),
    )


def stages_of(protocol: dict[str, Any], images: int, classes: int) -> list[tuple[int, int]]:
    """Return (images, epochs) of each phase of a protocol."""
    name, epochs = protocol["name"], protocol["epochs"]
    if name == "warm_start":
        counts = [protocol["share"] * images, images]
    elif name == "continual":
        counts = [(stage + 1) / protocol["stages"] * images for stage in range(protocol["stages"])]
    elif name == "class_incremental":
        new = [len(part) for part in np.array_split(range(classes), protocol["stages"])]
        counts = [seen / max(1, classes) * images for seen in np.cumsum(new)]
    elif name == "label_noise":
        counts = [protocol["noisy"], protocol["clean"]]
    else:  # random_label, permuted
        counts = [protocol.get("count") or images] * protocol["tasks"]
    if (replay := protocol.get("replay")) is not None:
        counts = [count - (1 - replay) * before for before, count in pairwise([0, *counts])]
    lengths = epochs if isinstance(epochs, Sequence) else [epochs] * len(counts)
    return [(round(count), length) for count, length in zip(counts, lengths, strict=True)]


def language(cfg: DictConfig) -> Work:
    """Return the work of a language run, with the iterations of language/schedule.py."""
    known = assumed()["tokens"]
    a, b = (cfg.corpus[key].train_tokens or known.get(cfg.corpus[key].name, 0) for key in ("a", "b"))
    blocks = [phase.block or cfg.model.block for phase in (cfg.phase_1, cfg.phase_2)]
    per_iteration = [cfg.accumulation * cfg.batch_size * block for block in blocks]
    window = [2 * cfg.eval_windows * block for block in blocks]
    lengths = []
    for phase, tokens, each in zip((cfg.phase_1, cfg.phase_2), (a, a + b), per_iteration, strict=True):
        length = phase.iterations or int(phase.passes * tokens / each)
        tests = math.ceil(length / (phase.eval_every or max(1, min(2000, length // 20)))) if length else 0
        stop = min(phase.stop_at or length, length)
        lengths.append((stop, math.ceil(tests * stop / length) if length else 0))
    (trunk, trunk_tests), (fork, fork_tests) = lengths
    if str(cfg.boundary.fork).isdigit():
        trunk = max(trunk, int(cfg.boundary.fork))
    matrices = 12 * cfg.model.layers * cfg.model.width**2 + cfg.model.vocabulary * cfg.model.width
    attention = 12 * cfg.model.layers * cfg.model.width * cfg.model.block
    weights = matrices + cfg.model.block * cfg.model.width
    return Work(
        trunk * per_iteration[0],
        fork * per_iteration[1],
        trunk_tests * window[0],
        (fork_tests + 2) * window[1],
        operations=6 * matrices + attention if cfg.size == "paper" else None,
        precision=cfg.precision,
        compile=cfg.compile,
        per_step=per_iteration[0],  # probes measure phase 1
        trunk_bytes=(2 + len(cfg.phase_1.save_at)) * RESUMABLE * weights,
        running_bytes=(cfg.run.keep + 1) * RESUMABLE * weights,
        left_bytes=STORED * weights,
        memory=gigabytes("memory_gb", "language"),
    )


def dqn(cfg: DictConfig) -> Work:
    """Return the work of a DQN run, in steps of all environments.

    The replay is in files: those of the first half are in the trunk, those of the second half in the run's folder.
    """
    first, second = cfg.midpoint, cfg.total_steps - cfg.midpoint
    tests = cfg.eval_steps if cfg.compat == "official" else 0
    frame = cfg.env.frame_size**2
    own = frame * min(cfg.replay_capacity, second)
    shared = frame * min(cfg.replay_capacity, cfg.total_steps)
    return Work(
        first,
        second,
        tests * (first // cfg.eval_every + 1),
        tests * (second // cfg.eval_every + 1),
        operations=None,
        precision=cfg.precision,
        compile=cfg.compile,
        per_step=1,
        trunk_bytes=shared,
        running_bytes=own,
        left_bytes=0,
        memory=gigabytes("memory_gb", "dqn") + own,
        trunk_memory=shared,
    )


def sac(cfg: DictConfig) -> Work:
    """Return the work of a SAC run, in agent steps. The replay is in memory and in every checkpoint."""
    first, second = cfg.midpoint, cfg.steps - cfg.midpoint
    tests = cfg.eval_episodes * cfg.eval_limit
    replay = assumed()["sac_transition_bytes"] * min(cfg.replay, cfg.steps)
    return Work(
        first,
        second,
        tests * (first // cfg.eval_every + 1),
        tests * (second // cfg.eval_every),
        operations=None,
        precision=cfg.precision,
        compile=cfg.compile,
        per_step=1,
        trunk_bytes=replay,
        running_bytes=cfg.run.keep * replay,
        left_bytes=0,
        memory=gigabytes("memory_gb", "sac") + replay,
    )


def gigabytes(what: str, domain: str) -> int:
    """Return an assumption of conf/campaign/assumed.yaml that is in GB, in bytes."""
    return round(1e9 * assumed()[what][domain])
