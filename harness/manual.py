"""`--help` of a training script: its experiments, sizes and methods, and every key with its meaning."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable

from omegaconf import OmegaConf

from fire_core.methods import available
from harness.config import SIZES, compose, file_of, in_file, options, resolve
from harness.domains import methods_of
from harness.overrides import choosable, files
from harness.settings import Domain, keys, wanted

WIDTH = 110


def manual(domain: Domain) -> str:
    """Return the text of `--help`, with the values of the default experiment at its default size."""
    cfg = compose(domain, [])
    config, default = resolve(domain, cfg), cfg.hydra.runtime.choices["experiment"]
    experiments = files(domain, "experiment")
    methods = available()
    here = [name for name in options("method") if name in methods_of(domain)]
    lines = [
        f"python {domain.script} [key=value ...]           one run; the same command resumes it",
        f"python {domain.script} -m method=none,fire seed=1,2,3   a sweep: every combination",
        f"\nsize: {', '.join(SIZES)}; here {config.size}",
        f"\nexperiment [sizes, minutes of a run on a CPU] (of conf/experiment; default {default}):",
        *_columns((name, _experiment(name)) for name in experiments),
        "\nmethod (of conf/method):",
        *_columns((name, methods[name].summary) for name in here),
        f"\nkey [value of {default} at size={config.size}]:",
    ]
    rows = []
    for name, (entry, kind) in keys(domain).items():
        if name in ("experiment", "size", "method", "minutes"):
            continue
        value = OmegaConf.select(config, name)
        value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        shown = json.dumps(value) if value is None or isinstance(value, bool) else value
        must = wanted(entry, kind).removeprefix("give ").removeprefix("choose ")
        rows.append((f"{name} [{shown}]", f"{entry.metadata['meaning']} ({must})"))
    settings = ", ".join(f"method.{key}" for key in config.method if key != "name")
    found = {
        group: files(domain, group) for group in choosable(domain) if group not in ("experiment", "method")
    }
    groups = [f"{group}: {', '.join(names)}" for group, names in found.items() if names]
    return "\n".join(
        [
            *lines,
            *_columns(rows),
            *(
                "",
                textwrap.fill(
                    f"settings of method={config.method.name}: {settings}; of any other: conf/method/<name>.yaml",
                    WIDTH,
                ),
            ),
            *(["\nfiles of settings, chosen as <group>=<name>:"] if groups else []),
            *(textwrap.fill(g, WIDTH, initial_indent="  ", subsequent_indent="    ") for g in groups),
            "\n--cfg job prints the config of a command line and runs nothing.",
        ]
    )


def _experiment(name: str) -> str:
    """Return what an experiment is, in the first sentence of its file's comments, and its sizes with their minutes."""
    lines = [
        line[1:].strip() for line in file_of("experiment", name).read_text().splitlines() if line[:1] == "#"
    ]
    lines = [line for line in lines if "@package" not in line]
    end = next((number for number, line in enumerate(lines, 1) if line.endswith((".", "?"))), len(lines))
    minutes, sizes = in_file(name, "minutes") or {}, in_file(name, "at") or {}
    known = [f"{size} {minutes[size]:g} min" if size in minutes else size for size in SIZES if size in sizes]
    return " ".join([*lines[:end], f"[{', '.join(known)}]"])


def _columns(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = min(34, max((len(name) for name, _ in rows), default=0))
    return [
        textwrap.fill(
            f"{name:<{width}}  {text}", WIDTH, initial_indent="  ", subsequent_indent=" " * (width + 4)
        )
        for name, text in rows
    ]
