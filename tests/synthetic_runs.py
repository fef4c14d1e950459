"""Run folders with known numbers, in the format that the scripts write."""

import itertools
import json
from pathlib import Path

import numpy as np

COMMIT, CELL = "0123456789abcdef", "fig2a_cifar10_resnet18"


def write_run(
    root: Path, experiment: str, label: str, seed: int, lines: list[dict], *, size: str = "small",
    data: str = "fashion_mnist", end: str | None = "DONE", boundary: dict | None = None, **told: object,
) -> Path:  # fmt: skip
    """One run folder; `end` is the marker file, None leaves the run unfinished; `told` is more of meta.json."""
    folder = root / experiment / size / label / f"seed_{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    overrides = [text if "." in text.partition("=")[0] else f"method.{text}" for text in label.split("-")[1:]]
    meta = {
        "commit": COMMIT, "dirty": False, "hardware": "test processor, 2 cores", "started": "2026-01-01T00:00:00",
        "experiment": experiment, "size": size, "method": label.partition("-")[0], "overrides": overrides,
        "label": label, "seed": seed, "data": data, "domain": "vision",
    }  # fmt: skip
    (folder / "meta.json").write_text(json.dumps(meta | told))
    protocol = "" if experiment.startswith(("fig3", "fig4")) else "warm_start"
    protocol = experiment if experiment in ("random_label", "label_noise") else protocol
    (folder / "config.yaml").write_text(f"protocol: {{name: {protocol}}}\nseed: {seed}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "timing.jsonl").write_text(json.dumps({"seconds": 1.5, "phase": 0}) + "\n")
    if boundary:
        (folder / f"boundary_{boundary['phase']}.json").write_text(json.dumps(boundary))
    if end:
        (folder / end).write_text("" if end == "DONE" else "loss is nan at step 7\n\nTraceback ...\n")
    return folder


def warm_start_lines(level: float, seed: int, epochs: int = 10) -> list[dict]:
    """Two phases; the last test accuracy is exactly `level` + seed / 1000."""
    lines = []
    for phase, epoch in itertools.product((0, 1), range(1, epochs + 1)):
        rise = (level + seed / 1000) * (1 - np.exp(-epoch)) / (1 - np.exp(-epochs))
        line = {"phase": phase, "epoch": epoch, "step": (phase * epochs + epoch) * 10}
        lines.append(line | {"test_accuracy": float(rise * (0.7 + 0.3 * phase))})
    return lines


def write_runs(root: Path, experiment: str, levels: dict[str, float], seeds=(1, 2), **options) -> None:
    """A warm start of each label and seed, with its level."""
    for label, seed in itertools.product(levels, seeds):
        write_run(root, experiment, label, seed, warm_start_lines(levels[label], seed), **options)


def task_lines(levels: list[float], seed: int) -> list[dict]:
    """One training accuracy at the end of each task."""
    at = ({"phase": k, "epoch": 30, "step": (k + 1) * 100} for k in itertools.count())
    return [line | {"train_accuracy": level + seed / 1000} for line, level in zip(at, levels)]


def boundary_report(method: str, phase: int = 1) -> dict:
    """Three matrices that changed, with what the analysis reads of them."""
    same = {"dfi_after": 0.5, "dfi_factor": 0.1}
    rows = [{"name": f"layer{i}.weight", "dfi_before": 5.0 + i, "sfe": 2.0 + i} | same for i in range(3)]
    return {"phase": phase, "method": method, "seconds": 0.01, "rows": rows}
