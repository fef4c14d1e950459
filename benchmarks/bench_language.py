"""Tokens per second of language/train.py against a plain training loop.

    python -m benchmarks.bench_language [--rounds 5] [--size small] [--device cpu]

Both train the same decoder on the same text with the same optimizer settings (fused AdamW, clipped gradients). The
plain loop has a constant learning rate; both use `scaled_dot_product_attention`, and evaluation is not timed. Ours is
the real script in a process of its own, with its records, checkpoints and method calls. The two take turns in
alternating order, so that other work on the machine slows both. Also measured: the cost of FIRE at the boundary,
compared with phase 2.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from analysis.results_file import loop_row, merge_loops
from fire_core.projection import fire
from harness.overrides import compose_config
from language.model import Decoder, Shape
from language.throughput import synchronise

ROOT = Path(__file__).resolve().parents[1]


class PlainBlock(nn.Module):
    """A pre-norm transformer block in the form that most small GPT scripts have."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time_, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).split(width, dim=2)
        q, k, v = (y.view(batch, time_, self.heads, -1).transpose(1, 2) for y in (q, k, v))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(batch, time_, width))
        return x + self.down(functional.gelu(self.up(self.norm_2(x))))


class PlainGPT(nn.Module):
    """The model of the plain loop, with the sizes of ours and a tied head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.block, shape.width)
        self.blocks = nn.ModuleList(PlainBlock(shape.width, shape.heads) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy of `targets` (batch, time), in nats."""
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def plain_loop(cfg, shape: Shape, iterations: int, device: torch.device, data: Path) -> float:
    """Return tokens per second over the second half of `iterations` iterations."""
    corpus = np.memmap(data / "language/encyclopaedic-small/train.bin", np.uint16, "r")
    net = PlainGPT(shape).to(device)
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
            ids = torch.stack(
                [torch.from_numpy(corpus[s : s + shape.block].astype(np.int64)) for s in starts]
            )
            wanted = torch.stack(
                [torch.from_numpy(corpus[s + 1 : s + 1 + shape.block].astype(np.int64)) for s in starts]
            )
            with torch.autocast(device.type, torch.bfloat16, enabled=cfg.precision == "bf16"):
                loss = net(ids.to(device), wanted.to(device)) / cfg.accumulation
            loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), cfg.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    synchronise(device)
    counted = iterations - iterations // 2
    return counted * cfg.accumulation * cfg.batch_size * shape.block / (time.perf_counter() - started)


def our_script(options: argparse.Namespace, root: Path, data: Path) -> float:
    """Return the tokens per second that the script itself records for the second half of as many iterations."""
    half = options.iterations // 2
    changes = [
        *(f"size={options.size}", f"device={options.device}", "method=none", "boundary.fork=last"),
        *(
            f"phase_1.iterations={2 * half}",
            "phase_1.stop_at=null",
            "phase_1.save_at=[]",
            f"phase_1.eval_every={half}",
        ),
        *(
            "phase_2.iterations=1",
            "eval_windows=1",
            f"run.root={root}",
            f"run.data_root={data}",
            "run.progress=false",
        ),
    ]
    command = [sys.executable, str(ROOT / "language/train.py"), *changes]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
    timing = next((root / "trunks").rglob("timing.jsonl")).read_text().splitlines()
    return [json.loads(line)["tokens_per_second"] for line in timing if "tokens_per_second" in line][1]


def boundary_seconds(shape: Shape, iterations: int, device: torch.device) -> float:
    """Return the seconds that fire() takes on a fresh decoder, with its report; the shorter of two calls."""
    seconds = []
    for _ in range(2):
        net = Decoder(shape).to(device)
        synchronise(device)
        started = time.perf_counter()
        fire(net, iterations=iterations)
        synchronise(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def main() -> None:
    """Print medians, ratio and the time of FIRE as a share of phase 2; write the ratio to bench_loops.csv."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=60, help="a run; the second half is timed")
    parser.add_argument("--size", default="small", choices=["smoke", "small"])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    cfg = compose_config("language", [f"size={options.size}", "experiment=fig3_best"])
    shape = Shape(**{k: v for k, v in cfg.model.items() if k != "name"})
    device = torch.device(options.device)
    torch.set_num_threads(cfg.threads)
    rates: dict[str, list[float]] = {"language/train.py": [], "plain loop": []}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "data"
        our_script(options, Path(folder) / "warm_up", data)  # prepares the text
        for number in range(options.rounds):
            for name in sorted(rates, reverse=number % 2 == 1):
                if name == "plain loop":
                    rates[name].append(plain_loop(cfg, shape, options.iterations, device, data))
                else:
                    rates[name].append(our_script(options, Path(folder) / str(number), data))
    for name, values in rates.items():
        print(
            f"{name:<18} median {statistics.median(values):9,.0f} tokens/s  {[round(v) for v in sorted(values)]}"
        )
    setting = f"{options.size}, batch {cfg.batch_size} x {cfg.accumulation}, {cfg.threads} thread(s), {cfg.precision}"
    row = loop_row("language", setting, "tokens/s", options.device, *rates.values())
    ours = row["ours"]
    print(f"ours / plain, median of the rounds: {row['ratio']:.3f} on {device}, {cfg.threads} thread(s)")
    phase_2 = (
        (cfg.corpus.a.train_tokens + cfg.corpus.b.train_tokens) / ours if options.size == "small" else None
    )
    seconds = boundary_seconds(shape, 5, device)
    share = f", {seconds / phase_2:.3%} of phase 2 ({phase_2:.0f} s)" if phase_2 else ""
    print(f"written to {merge_loops([row])}")
    print(f"FIRE at the boundary, {options.size} model: {seconds:.3f} s{share}")


if __name__ == "__main__":
    main()
