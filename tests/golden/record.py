"""The golden record: identities of runs, and checksums of the metrics of smoke runs.

    python tests/golden/record.py identities            # print the identities of all experiments, sizes and methods
    python tests/golden/record.py metrics               # print the checksums of the smoke runs
    python tests/golden/record.py metrics --keep FOLDER # and keep their metrics.jsonl, to see what differs
    python tests/golden/record.py identities metrics --write

A change of code that is not meant to change results leaves both as they are. Identities are the same on every machine;
the bytes of metrics.jsonl depend on the processor and on the version of PyTorch, so their record names both, and the test
compares them where both agree.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from training_scripts import SCRIPTS, SMALLEST, Script, killed  # noqa: E402

from fire_core.errors import UserError  # noqa: E402
from fire_core.methods import create  # noqa: E402
from harness.config import compose, domain_of, options, resolve  # noqa: E402
from harness.domains import find, methods_of  # noqa: E402
from harness.naming import identity  # noqa: E402
from harness.runs.folders import fingerprint  # noqa: E402
from harness.settings import Domain  # noqa: E402

HERE = Path(__file__).parent
IDENTITIES, METRICS = HERE / "identities.csv", HERE / "metrics.json"
# of each domain: a method that acts during training, and the steps after which a trigger fires
KINDS = {
    "vision": ("cbp method.maturity=1 method.replacement_rate=0.1", 4),
    "language": ("spectral", 8),
    "dqn": ("redo", 120),
    "sac": ("l2_init", 40),
}
KILL_AT = {"vision": 5, "language": 10, "dqn": 200, "sac": 80}  # a step in the last phase


def settings() -> Iterator[tuple[str, str]]:
    """Yield each experiment with each size that its own file names or, if it names none, the file that it builds on."""
    for experiment in options("experiment"):
        for size in own_sizes(experiment):
            yield experiment, size


def own_sizes(experiment: str) -> list[str]:
    content = OmegaConf.load(ROOT / "conf" / "experiment" / f"{experiment}.yaml")
    if "at" in content:
        return list(content["at"])
    bases = [base for base in content.get("defaults", []) if isinstance(base, str) and base != "_self_"]
    return own_sizes(bases[0]) if bases else []


def identity_of(experiment: str, size: str, method: str) -> str:
    """Return `<identity of the run>/<identity of its shared first phase>` ("-" if phase 0 is not shared).

    Return "refused" where the experiment has a trigger and the method acts during training.
    """
    line = [f"experiment={experiment}", f"size={size}", f"method={method}"]
    return identity_in(find(domain_of(experiment)), compose(find(domain_of(experiment)), line))


def identity_in(domain: Domain, composed: DictConfig) -> str:
    """Return the same of what Hydra composed."""
    try:
        cfg = resolve(domain, composed)
    except UserError:
        return "refused"
    domain.check(cfg)
    numbers, trunk = identity(domain, cfg, create(**cfg.method))
    return f"{fingerprint(numbers)}/{fingerprint(trunk) if trunk else '-'}"


def identities(pairs: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    """Yield one row per experiment and size: the identity of each method of its domain."""
    for experiment, size in pairs:
        methods = methods_of(find(domain_of(experiment)))
        yield {"experiment": experiment, "size": size} | {
            method: identity_of(experiment, size, method) for method in methods
        }


def machine() -> str:
    """Return what the bytes of a run depend on besides its settings."""
    return f"torch {torch.__version__.partition('+')[0]}, {torch.backends.cpu.get_cpu_capability()}"


def metrics(folder: Path, domains: Iterable[str] = SCRIPTS) -> dict[str, str]:
    """Return the checksum of metrics.jsonl of each smoke run, trained below `folder`.

    Each method runs undisturbed, then killed after phase 0 and resumed, then without a shared first phase. All three
    must write the same bytes.
    """
    found = {}
    for domain in domains:
        script, (during, steps) = Script(SCRIPTS[domain]), KINDS[domain]
        for method in ("none", "fire", during, f"fire trigger=every trigger.steps={steps}"):
            kind = f"method={method}"
            line = [*SMALLEST[domain], "size=smoke", "seed=1", *kind.split()]
            digests = {}
            for way in ("shared", "killed", "alone"):
                root = folder / domain / kind.replace("=", "-").replace(" ", "_") / way
                run = [*line, f"run.root={root}", *(["run.trunk=false"] if way == "alone" else [])]
                if way == "killed":
                    kill = killed(f"step >= {KILL_AT[domain]}")
                    script.run([*run, "run.checkpoint_steps=1"], kill, (9,))
                script.run(run)
                [path] = [p for p in root.rglob("metrics.jsonl") if "trunks" not in p.parts]
                digests[way] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            assert len(set(digests.values())) == 1, f"{domain} {kind}: {digests}"
            found[f"{domain} {kind}"] = digests["shared"]
    return found


def as_csv(rows: list[dict[str, str]]) -> str:
    """Return rows as CSV, with the columns of all of them."""
    columns = ["experiment", "size", *sorted({key for row in rows for key in row} - {"experiment", "size"})]
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Print the golden record, or write it.")
    parser.add_argument("what", nargs="+", choices=["identities", "metrics"])
    parser.add_argument("--write", action="store_true", help="replace the committed record")
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    given = parser.parse_args()
    if "identities" in given.what:
        text = as_csv(list(identities(settings())))
        IDENTITIES.write_text(text) if given.write else print(text, end="")
    if "metrics" in given.what:
        with tempfile.TemporaryDirectory() as folder:
            found = metrics(given.keep or Path(folder))
        known = json.loads(METRICS.read_text()) if METRICS.exists() else {}
        text = json.dumps(known | {machine(): found}, indent=1) + "\n"
        METRICS.write_text(text) if given.write else print(text, end="")


if __name__ == "__main__":
    main()
