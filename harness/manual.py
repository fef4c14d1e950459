"""`--help` of a training script: its experiments, methods and the settings used most; `--help all` has everything."""

import json
import textwrap
from collections.abc import Iterable

from omegaconf import OmegaConf

from fire_core.methods import available
from harness.config import FOLDERS, SIZES, compose, content_of, file_of, options, read_yaml, resolve
from harness.domains import methods_of
from harness.settings import Domain, keys

WIDTH = 110
USED = {"seed", "learning_rate", "batch_size", "optimizer_state", "device", "threads", "run.root", "run.jobs"}
COMPOSED = ("experiment", "size", "method", "minutes")  # keys that the other parts of the text explain


def manual(domain: Domain, everything: bool = False) -> str:
    """Return the text of `--help`, with the values of the default experiment at its default size."""
    cfg = compose(domain, [])
    config, default = resolve(domain, cfg), cfg.hydra.runtime.choices["experiment"]
    experiments, methods = files(domain, "experiment"), available()
    figures = [name for name in experiments if everything or name.startswith("fig")] or experiments
    settings = [name for name in keys(domain) if name not in COMPOSED]
    if not everything:
        settings = [name for name in settings if name in USED.union(domain.shown)]
    sizes, parts = (SIZES, None) if everything else (("small", "medium"), 2)  # of a title, between colons
    titles = [(name, ": ".join(about(name, sizes).split(": ")[:parts])) for name in figures]
    lines = [
        f"python {domain.script} [key=value ...]           one run; the same command resumes it",
        f"python {domain.script} -m method=none,fire seed=1,2,3   a sweep: every combination",
        f"python {domain.script} --cfg job [key=value ...]  print the config and run nothing",
        f"\nsize: {', '.join(SIZES)}; here {config.size}",
        f"\nexperiment [sizes, minutes of a run on a CPU] (default {default}):",
        *_columns(titles, whole=everything),
    ]
    if others := [name for name in experiments if name not in figures]:
        lines += _filled("others: ", others)
    lines += [
        "\nmethod:",
        *_columns(((name, methods[name].summary) for name in methods_of(domain)), whole=everything),
        f"\nkey [value of {default} at size={config.size}]:",
        *_columns((_key(domain, config, name) for name in settings), whole=True),
    ]
    if not everything:
        return "\n".join([*lines, "\n--help all lists every experiment, setting and file of settings."])
    own = [f"method.{key}" for key in config.method if key != "name"]
    lines += ["", *_filled(f"settings of method={config.method.name}: ", own)]
    lines += ["\nfiles of settings, chosen as <group>=<name>:"]
    for group in sorted({path.name for folder in FOLDERS for path in folder.iterdir()} - {"experiment"}):
        if names := files(domain, group):
            lines += _filled(f"{group}: ", names)
    return "\n".join(lines)


def files(domain: Domain, group: str) -> list[str]:
    """Return the names that a script can choose from a group: those whose keys it has."""
    if group == "experiment":
        return [name for name in options(group) if content_of(name).get("domain") == domain.name]
    if group == "search":
        return options(group)
    known = {key.split(".")[1] for key in keys(domain) if key.startswith(f"{group}.")}
    return [name for name in options(group) if known >= set(read_yaml(file_of(group, name)))]


def _key(domain: Domain, config: OmegaConf, name: str) -> tuple[str, str]:
    """Return a key with its value, and what it means and may be."""
    known = keys(domain)[name]
    value = OmegaConf.select(config, name)
    shown = json.dumps(value) if value is None or isinstance(value, bool) else value
    must = known.wanted().removeprefix("give ").removeprefix("choose ")
    return f"{name} [{shown}]", f"{known.meaning} ({must})"


def about(name: str, sizes: Iterable[str] = ()) -> str:
    """Return the first sentence of the comments in an experiment's file, after its `sizes`, with their minutes."""
    text = file_of("experiment", name).read_text().splitlines()
    lines = [line[1:].strip() for line in text if line[:1] == "#" and "@package" not in line]
    end = next((number for number, line in enumerate(lines, 1) if line.endswith((".", "?"))), len(lines))
    minutes, known = content_of(name).get("minutes", {}), content_of(name)["at"]
    told = [f"{size} {minutes[size]:g}" if size in minutes else size for size in sizes if size in known]
    return " ".join([f"[{', '.join(told)}]".ljust(24), *lines[:end]] if sizes else lines[:end])


def _columns(rows: Iterable[tuple[str, str]], whole: bool) -> list[str]:
    """Return rows as two columns. Unless they are shown whole, a row is one line."""
    rows = list(rows)
    width = min(34, max((len(name) for name, _ in rows), default=0))
    texts = [f"  {name:<{width}}  {text}" for name, text in rows]
    if whole:
        return [textwrap.fill(text, WIDTH, subsequent_indent=" " * (width + 4)) for text in texts]
    return [text if len(text) <= WIDTH else text[: WIDTH - 3] + "..." for text in texts]


def _filled(start: str, names: Iterable[str]) -> list[str]:
    return [textwrap.fill(start + ", ".join(names), WIDTH, initial_indent="  ", subsequent_indent="    ")]
