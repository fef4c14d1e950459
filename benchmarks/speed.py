"""Speed of the training scripts, from the times that a short run of the script itself records.

    python -m benchmarks.speed vision
    python -m benchmarks.speed dqn size=paper device=cuda compile=true channels_last=true run.emulator_threads=4

What follows the domain are overrides of its script, beside those of SHORT. Rates are of whole loops with `method=none`, with
acting and without tests: the median of all windows but the first. Writes a line into analysis/results/speed.csv.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.measuring import parser, record
from harness.device import pick_device
from harness.domains import find
from harness.runs.machine import ROOT

SHORT = {  # overrides
    "vision": "experiment=fig2a_cifar10_resnet18 protocol.epochs=[1,6] eval_every=1000",
    "language": "experiment=fig3_best boundary.fork=last eval_windows=60 phase_1.passes=null phase_1.iterations=60 "
    "phase_1.stop_at=null phase_1.save_at=[] phase_1.eval_every=10 phase_2.passes=null phase_2.iterations=1 "
    "phase_2.eval_every=1",
    "dqn": "experiment=fig4a_asterix total_steps=6000 midpoint=4000 replay_capacity=8000 learning_starts=1000 "
    "log_every=1000 eval_every=6000 eval_steps=400 eval_episodes=4 eval_max_steps=100 random_episodes=4",
    "sac": "experiment=fig4b_hopper steps=3000 midpoint=1500 learning_starts=500 eval_every=500 eval_episodes=1 "
    "random_episodes=1",
}

COUNTS = {  # unit of the rate, and the count in timing.jsonl
    "vision": ("steps/s", "step"),
    "language": ("tokens/s", "tokens"),
    "dqn": ("updates/s", "updates"),
    "sac": ("steps/s", "agent_steps"),
}


def rates(count: str, timing: list[dict[str, Any]]) -> list[float]:
    """Return how much a count grows per second in each window in which it does."""
    windows = pairwise(line for line in timing if count in line)
    return [(b[count] - a[count]) / b["seconds"] for a, b in windows if b[count] > a[count]]


def shortened(domain: str, changes: list[str]) -> list[str]:
    """Return the overrides of a short run: `changes`, and those of SHORT whose keys they do not name."""
    given = {change.partition("=")[0] for change in changes}
    return [*(line for line in SHORT[domain].split() if line.partition("=")[0] not in given), *changes]


def measure(domain: str, changes: list[str]) -> dict[str, Any]:
    """Return the line of speed.csv of one short run of a script with `changes`."""
    with tempfile.TemporaryDirectory() as root:
        fixed = ["method=none", "run.trunk=false", "run.progress=false", f"run.root={root}"]
        command = [sys.executable, str(ROOT / find(domain).script), *shortened(domain, changes), *fixed]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        (path,) = Path(root).rglob("timing.jsonl")
        timing = [json.loads(line) for line in path.read_text().splitlines()]
    unit, count = COUNTS[domain]
    found = rates(count, timing)[1:]
    given = {"size": "small", "device": "auto"} | dict(change.partition("=")[::2] for change in changes)
    row = {"domain": domain, "size": given.pop("size"), "device": str(pick_device(given.pop("device")))}
    row |= {"setting": " ".join(map("=".join, given.items())), "unit": unit, "windows": len(found)}
    summary = {"rate": statistics.median(found), "lowest": min(found), "highest": max(found)}
    return row | {name: round(rate, 2) for name, rate in summary.items()}


if __name__ == "__main__":
    command = parser(__doc__)
    command.add_argument("domain", choices=list(SHORT))
    command.add_argument("overrides", nargs="*")
    options = command.parse_args()
    record("speed", measure(options.domain, options.overrides), ("domain", "size", "setting", "device"))
