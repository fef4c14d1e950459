"""Names, colours and marks of methods, and the titles of panels, from names.yaml."""

import zlib
from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import yaml

from analysis.runs import Results
from fire_core.methods import title as title_of

NAMES = yaml.safe_load((Path(__file__).parent / "names.yaml").read_text(encoding="utf-8"))


class Look(NamedTuple):
    """Name in legends and tables, colour and marker."""

    name: str
    colour: str
    marker: str


# in the order of every table
METHODS = {key: Look(title_of(key), *entry) for key, entry in NAMES["methods"].items()}
INTEREST = ("fire", "none", "shrink_perturb", "full_reset", "dash", "plasticity_injection")


def look(method: str, changed: Mapping[str, str] | None = None) -> Look:
    """Return the look of a method, with the settings that were changed in its name. The colour and the marker of a method
    that METHODS does not list are computed from its name."""
    looks = list(product(NAMES["others"]["markers"], NAMES["others"]["colours"]))
    marker, colour = looks[zlib.crc32(method.encode()) % len(looks)]
    known = METHODS.get(method) or Look(title_of(method), colour, marker)
    return Look(f"{known.name} [{changes(changed)}]", known.colour, known.marker) if changed else known


def changes(changed: Mapping[str, str]) -> str:
    """Return changed settings as text, as in `iterations=20, scale=initial`."""
    return ", ".join(f"{key.removeprefix('method.')}={value}" for key, value in changed.items())


def ordered(methods: Iterable[str]) -> list[str]:
    """Return the methods, without duplicates, in the order of METHODS, then unknown ones by name."""
    known = list(METHODS)
    return sorted(set(methods), key=lambda name: (known.index(name) if name in known else len(known), name))


def looks(results: Results) -> dict[str, Look]:
    """Return {label: look} in the order of every table; a method is followed by its runs with changed settings."""
    changed, methods = results.overrides, results.methods
    order = ordered(methods.values())
    labels = sorted(methods, key=lambda label: (order.index(methods[label]), label != methods[label], label))
    return {label: look(methods[label], changed[label]) for label in labels}


def title(part: Results, between: str = "\n") -> str:
    """Return the title of a panel: network and data, then resolution or shape, protocol, variant and seeds."""
    run = part.first
    model = run["model"] or run["domain"]
    model = "GPT" if model.startswith("gpt") else NAMES["models"].get(model, model)
    seeds = seeds_text(part.finished.groupby("label")["seed"].nunique())
    protocol = "" if run["figure"].startswith("fig2") else NAMES["protocols"].get(run["protocol"], "")
    variant = NAMES["variants"].get(run["experiment"], "")
    more = ", ".join(filter(None, [run["detail"], protocol, variant, seeds]))
    return f"{model} on {data(run['data'])}{between}{more}"


def seeds_text(counts: pd.Series) -> str:
    """Return `5 seeds`, or `3-5 seeds` where the methods have different numbers."""
    fewest, most = counts.min(), counts.max()
    return f"{fewest}-{most} seeds" if fewest < most else f"{most} seed{'s' if most != 1 else ''}"


def panel(experiment: str) -> str:
    """Return for example `2a ResNet-18` for a panel of the paper, and the name itself for another experiment."""
    figure, _, name = experiment.partition("_")
    known = NAMES["panels"].get(name) if figure.startswith("fig") else None
    return f"{figure.removeprefix('fig')} {known}" if known else experiment


def data(name: str) -> str:
    """Return the usual name of a data set, corpus, game or task."""
    words = name.replace("+", ", then ").replace("_", " ")
    return NAMES["data"].get(name, words.capitalize() if words.islower() and " " not in words else words)
