"""The golden record: identities of runs, and checksums of the metrics of smoke runs.

    python tests/golden/record.py identities            # write the identities of all experiments, sizes and methods
    python tests/golden/record.py metrics               # write the checksums of the smoke runs
    python tests/golden/record.py metrics --keep FOLDER # and keep their metrics.jsonl, to see what differs

Where results do not change, both files stay. Metrics are compared where processor and PyTorch are those of the record.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

import pandas as pd
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
from harness.runs.machine import hardware  # noqa: E402
from harness.settings import Domain  # noqa: E402

HERE = Path(__file__).parent
IDENTITIES, METRICS = HERE / "identities.csv", HERE / "metrics.json"
# of each domain: a method that acts during training, and the steps after which a trigger fires
KINDS = {
    "vision": ("cbp method.maturity=1 method.replacement_rate=0.1", 4), "language": ("spectral", 8),
    "dqn": ("redo", 120), "sac": ("l2_init", 40),
}  # fmt: skip
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
    """Return the identity of what a command line composes."""
    line = [f"experiment={experiment}", f"size={size}", f"method={method}"]
    return identity_in(find(domain_of(experiment)), compose(find(domain_of(experiment)), line))


def identity_in(domain: Domain, composed: DictConfig) -> str:
    """Return `<identity>/<identity of the shared phase 0, or "-">`, or "refused" where trigger and method do not fit."""
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
        found = {method: identity_of(experiment, size, method) for method in methods}
        yield {"experiment": experiment, "size": size} | found


def machine() -> str:
    """Return what the bytes of a run depend on besides its settings."""
    return f"torch {torch.__version__.partition('+')[0]}, {hardware().partition(',')[0]}"


def metrics(folder: Path, domains: Iterable[str] = SCRIPTS) -> dict[str, str]:
    """Return checksums of metrics.jsonl of smoke runs: undisturbed, killed and resumed, without a trunk; all the same."""
    found = {}
    for domain in domains:
        script, (during, steps) = Script(SCRIPTS[domain]), KINDS[domain]
        for method in ("none", "fire", during, f"fire trigger=every trigger.steps={steps}"):
            kind = f"method={method}"
            line, digests = [*SMALLEST[domain], "size=smoke", "seed=1", *kind.split()], {}
            for way in ("shared", "killed", "alone"):
                root = folder / domain / kind.replace("=", "-").replace(" ", "_") / way
                run = [*line, f"run.root={root}", *(["run.trunk=false"] if way == "alone" else [])]
                if way == "killed":
                    script.run([*run, "run.checkpoint_steps=1"], killed(f"step >= {KILL_AT[domain]}"), (9,))
                script.run(run)
                [path] = [p for p in root.rglob("metrics.jsonl") if "trunks" not in p.parts]
                digests[way] = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
            assert len(set(digests.values())) == 1, f"{domain} {kind}: {digests}"
            found[f"{domain} {kind}"] = digests["shared"]
    return found


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="Renew the golden record.")
    parser.add_argument("what", nargs="+", choices=["identities", "metrics"])
    parser.add_argument("--keep", type=Path, help="a folder for the runs")
    given = parser.parse_args()
    if "identities" in given.what:
        rows = pd.DataFrame(identities(settings())).set_index(["experiment", "size"])
        rows.sort_index(axis=1).to_csv(IDENTITIES)
    if "metrics" in given.what:
        with tempfile.TemporaryDirectory() as folder:
            found = metrics(given.keep or Path(folder))
        known = json.loads(METRICS.read_text()) | {machine(): found}
        METRICS.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
