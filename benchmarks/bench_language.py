"""Tokens per second of language/train.py against a plain training loop.

    python -m benchmarks.bench_language [--rounds 5] [--device cpu]

Both train the same decoder on the same text with the same optimizer settings (fused AdamW, clipped gradients). The
plain loop has a constant learning rate; evaluation is not timed. Ours is the real script in a process of its own, with
its records, checkpoints and method calls.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

from benchmarks.measuring import loop_rows, parser, record_loops, take_turns
from harness.overrides import compose_config
from language.model import Decoder, Shape
from language.throughput import synchronise

ROOT = Path(__file__).resolve().parents[1]


def plain_loop(cfg, shape: Shape, iterations: int, device: torch.device, data: Path) -> float:
    """Return tokens per second over the second half of `iterations` iterations."""
    corpus = np.memmap(data / "language/encyclopaedic-small/train.bin", np.uint16, "r")
    net = Decoder(shape).to(device)
    groups = [
        {"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": cfg.weight_decay},
        {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=cfg.learning_rate, betas=tuple(cfg.betas), fused=True)
    started = 0.0
    for iteration in range(iterations):
        if iteration == iterations // 2:
            synchronise(device)
            started = time.perf_counter()
        for _ in range(cfg.accumulation):
            starts = torch.randint(len(corpus) - shape.block, (cfg.batch_size,)).tolist()
            windows = np.stack([corpus[start : start + shape.block + 1] for start in starts])
            ids = torch.from_numpy(windows.astype(np.int64)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
                loss = net(ids[:, :-1], ids[:, 1:]) / cfg.accumulation
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronise(device)
    counted = iterations - iterations // 2
    return counted * cfg.accumulation * cfg.batch_size * shape.block / (time.perf_counter() - started)


def our_script(iterations: int, device: torch.device, data: Path) -> float:
    """Return the tokens per second that the script itself records for the second half of as many iterations."""
    half = iterations // 2
    with tempfile.TemporaryDirectory() as root:
        changes = [
            "size=small", f"device={device}", "method=none", "boundary.fork=last",
            f"phase_1.iterations={2 * half}", "phase_1.stop_at=null", "phase_1.save_at=[]",
            f"phase_1.eval_every={half}", "phase_2.iterations=1", "eval_windows=1",
            f"run.root={root}", f"run.data_root={data}", "run.progress=false",
        ]  # fmt: skip
        command = [sys.executable, str(ROOT / "language/train.py"), *changes]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
        timing = next((Path(root) / "trunks").rglob("timing.jsonl")).read_text().splitlines()
    return [json.loads(line)["tokens_per_second"] for line in timing if "tokens_per_second" in line][1]


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--iterations", type=int, default=60, help="a run; the second half is timed")
    command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = command.parse_args()
    cfg = compose_config("language", ["size=small", "experiment=fig3_best"])
    shape = Shape(**{k: v for k, v in cfg.model.items() if k != "name"})
    device = torch.device(options.device)
    torch.set_num_threads(cfg.threads)
    ours = f"small, batch {cfg.batch_size} x {cfg.accumulation}, {cfg.threads} thread(s), {cfg.precision}"
    with tempfile.TemporaryDirectory() as folder:  # the script prepares the text there in the first round
        loops = {
            ours: lambda: our_script(options.iterations, device, Path(folder)),
            "usual": lambda: plain_loop(cfg, shape, options.iterations, device, Path(folder)),
        }
        rates = take_turns(loops, options.rounds, lambda loop: loop())
    record_loops(loop_rows("language", "tokens/s", options.device, rates))


if __name__ == "__main__":
    main()
