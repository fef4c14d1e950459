"""Manifests of conf/campaign, and the list of their runs in the order of training."""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from fire_core.errors import UserError, did_you_mean
from fire_core.methods import available, create
from harness.campaign.work import Work, work_of
from harness.config import CONF, compose, domain_of, options, parse, resolve
from harness.domains import find, known
from harness.launch import changes, identity, label
from harness.overrides import check_overrides
from harness.runs import Run

SCRIPTS = {name: find(name).script for name in known()}
KEYS = {"size", "first", "jobs", "delete_trunks", "cells", "afterwards"}
CELL_KEYS = {"experiment", "options", "runs"}
RUNS_KEYS = {"seeds", "methods", "sweep"}


@dataclass(frozen=True)
class Job:
    """One run of a manifest.

    arguments: overrides of the script. trunk: folder of the shared phase 0, or None. rank: (turn among the seeds,
    whether the method is not in `first`, number of the cell, position of the method); jobs are trained in ascending
    order. minutes: expected duration on a CPU, from the experiment's file. last_phase: fingerprint of a last phase that
    several jobs share, or None; the first of them trains it and the others adopt it.
    """

    domain: str
    experiment: str
    method: str
    seed: int
    arguments: tuple[str, ...]
    folder: Path
    trunk: Path | None
    work: Work
    rank: tuple[int, ...]
    minutes: float | None
    last_phase: str | None

    @property
    def name(self) -> str:
        """`<experiment>/<label>/seed_<n>`."""
        return f"{self.experiment}/{self.folder.parent.name}/{self.folder.name}"

    @property
    def done(self) -> bool:
        return (self.folder / "DONE").exists()


@dataclass(frozen=True)
class Manifest:
    """The runs of a manifest and how they are trained.

    jobs: in the order of training. missing: experiments without the manifest's size. at_a_time: runs at a time, by
    domain. per_core: domains in which that is the number of cores. delete_trunks: domains whose trunks are deleted
    after their last run. afterwards: modules to run once all jobs are done.
    """

    name: str
    size: str
    jobs: list[Job]
    missing: list[str]
    at_a_time: dict[str, int]
    per_core: tuple[str, ...]
    delete_trunks: tuple[str, ...]
    afterwards: tuple[str, ...]


def load(name: str, root: str, more: Callable[[str], tuple[str, ...]] = lambda domain: ()) -> Manifest:
    """Return the manifest `name` with all its runs, after composing and checking the config of each.

    Args:
        name: the manifest is `conf/campaign/<name>.yaml`, or the file `name` if that ends in .yaml.
        root: folder of all runs.
        more: domain -> overrides for every run of it, as in `precision=bf16`.
    """
    content = read(name)
    jobs: list[Job] = []
    missing: list[str] = []
    methods = available()
    for number, cell in enumerate(content["cells"]):
        experiment, domain = cell["experiment"], domain_of(cell["experiment"])
        if content["size"] not in sizes_of(experiment):
            missing.append(experiment)
            continue
        always = [
            f"experiment={experiment}",
            f"size={content['size']}",
            *cell.get("options", []),
            *more(domain),
        ]
        always.append(f"run.root={root}")
        check_overrides(find(domain), always)
        composed = compose(find(domain), always)
        for group in cell["runs"]:
            axes = [[f"{key}={value}" for value in values] for key, values in group.get("sweep", {}).items()]
            for position, method in enumerate(group["methods"]):
                for point in itertools.product(*axes):
                    # methods that watch activations cannot be compiled, the others of their cell can
                    watches = method in methods and methods[method].watches_training
                    fixed = [a.replace("compile=true", "compile=false") if watches else a for a in always]
                    typed = [*fixed, f"method={method}", *point]
                    cfg = with_method(domain, composed, method, typed)
                    later = method not in content["first"]
                    ranks = {
                        seed: (turn, later, number, position) for turn, seed in enumerate(group["seeds"])
                    }
                    jobs += jobs_of(domain, typed, cfg, ranks)
    cores = os.cpu_count() or 1
    at_a_time = {domain: content["jobs"].get(domain) or cores for domain in SCRIPTS}
    jobs.sort(key=lambda one: one.rank)
    return Manifest(
        Path(name).stem,
        content["size"],
        jobs,
        missing,
        at_a_time,
        tuple(domain for domain in SCRIPTS if not content["jobs"].get(domain)),
        tuple(content.get("delete_trunks", ())),
        tuple(content.get("afterwards", ())),
    )


def read(name: str) -> dict[str, Any]:
    """Return the content of a manifest's file. Raises UserError if it, a key or an experiment does not exist."""
    path = Path(name) if name.endswith(".yaml") else CONF / "campaign" / f"{name}.yaml"
    if not path.is_file():
        known = sorted(file.stem for file in (CONF / "campaign").glob("*.yaml") if file.stem != "assumed")
        raise UserError(f"there is no campaign {name!r}{did_you_mean(name, known)}")
    content = yaml.safe_load(path.read_text())
    _only(content, KEYS, path, needed=("size", "first", "jobs", "cells"))
    for cell in content["cells"]:
        _only(cell, CELL_KEYS, path, needed=("experiment", "runs"))
        if (experiment := cell["experiment"]) not in (known := options("experiment")):
            raise UserError(
                f"{path}: experiment {experiment!r} does not exist{did_you_mean(experiment, known)}"
            )
        for group in cell["runs"]:
            _only(group, RUNS_KEYS, path, needed=("seeds", "methods"))
    return content


def _only(found: dict[str, Any], known: set[str], path: Path, needed: tuple[str, ...]) -> None:
    if missing := [key for key in needed if key not in found]:
        raise UserError(f"{path}: key {missing[0]!r} is missing in {str(found)[:60]}")
    for key in found:
        if key not in known:
            raise UserError(f"{path}: key {key!r} is unknown{did_you_mean(key, sorted(known))}")


def sizes_of(experiment: str) -> list[str]:
    """Return the sizes of an experiment, including those of the experiment it builds on."""
    content = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text()) or {}
    found = list(content.get("at", {}))
    for base in content.get("defaults", []):
        if isinstance(base, str) and base != "_self_":
            found += sizes_of(base)
    return found


def with_method(domain: str, composed: DictConfig, method: str, typed: list[str]) -> DictConfig:
    """Return the config that the script composes from `typed`.

    Hydra takes a third of a second to compose a config. All methods of a cell therefore share `composed`, in which only
    the settings of the method are replaced.
    """
    if method not in options("method"):
        raise UserError(f"method={method} does not exist{did_you_mean(method, options('method'))}")
    cfg = copy.copy(composed)
    OmegaConf.set_struct(cfg, False)
    cfg.method = OmegaConf.load(CONF / "method" / f"{method}.yaml")
    cfg.hydra.overrides.task = typed
    return resolve(find(domain), cfg)


def jobs_of(domain: str, typed: list[str], cfg: DictConfig, ranks: dict[int, tuple[int, ...]]) -> list[Job]:
    """Return one job for each seed of `ranks` ({seed: rank}); the seeds differ in no other key of the config."""
    method = create(**cfg.method)
    numbers, trunk = identity(find(domain), cfg, method)
    name, work = label(cfg.method.name, changes(find(domain), parse(typed))), work_of(cfg)
    jobs = []
    for seed, rank in ranks.items():
        run = Run.open(
            numbers | {"seed": seed},
            root=cfg.run.root,
            experiment=cfg.experiment,
            size=cfg.size,
            label=name,
            seed=seed,
            trunk=None if trunk is None else trunk | {"seed": seed},
        )
        jobs.append(
            Job(
                domain,
                cfg.experiment,
                cfg.method.name,
                seed,
                (*typed, f"seed={seed}"),
                run.folder,
                run.trunk,
                work,
                rank,
                cfg.minutes,
                None,
            )
        )
    return jobs
