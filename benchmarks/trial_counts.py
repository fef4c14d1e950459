"""What trials find on small networks with a planted fault, and how often they name a winner on a healthy one.

python -m benchmarks.trial_counts [FAULT ...] [--trials 200]

Each trial has a network, data and a seed of its own. What should win was written down in tests/library/test_trial.py
before the first run; docs/how-to/try_before_you_treat.md has the counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pandas as pd
import torch
from torch import nn
from torch.nn import functional

from analysis.rendering import markdown
from benchmarks.measuring import parser
from fire_core import TrialResult, trial
from fire_core.trial import METHODS

# fault: (methods of which one should win, methods that should not be shown ahead of none)
EXPECTED = {
    "half dead": (("redo", "full_reset"), ("clear", "rescale")),
    "low rank": (("fire", "full_reset"), ("clear", "rescale")),
    "ten times too large": (("rescale",), ("clear",)),
    "stale moments": (("clear",), ("fire", "rescale", "shrink_perturb", "full_reset")),
    "healthy": (("none", None), ()),
}
STEPS = 60


def network(bias: bool) -> nn.Sequential:
    """Return an MLP of two hidden layers of 32 units."""
    layers: list[nn.Module] = []
    for inputs in (16, 32):
        layers += [nn.Linear(inputs, 32, bias=bias), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(32, 10, bias=bias))


def step(net: nn.Module, optimizer: torch.optim.Optimizer, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Make one update and return the loss."""
    inputs, labels = batch
    optimizer.zero_grad()
    loss = functional.cross_entropy(net(inputs), labels)
    loss.backward()
    optimizer.step()
    return loss


def run(fault: str, seed: int, **options: object) -> TrialResult:
    """Train a network of its own for each seed, plant the fault, and return a trial."""
    torch.manual_seed(seed)
    net = network(bias=fault != "ten times too large")
    start = {name: value.clone() for name, value in net.state_dict().items()}
    inputs = torch.randn(1500, 16)
    with torch.no_grad():  # classes that a random network of the same kind tells apart
        outputs = network(bias=True)(3 * inputs)
        labels = (outputs - outputs.mean(0)).argmax(1)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3, fused=True)
    for number in range(300):
        first = number * 32 % 480
        step(net, optimizer, (inputs[first : first + 32], labels[first : first + 32]))
    hidden = [layer for layer in net[:-1] if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for layer in hidden:
            if fault == "half dead":
                layer.bias[::2] = -10.0
            if fault == "low rank":
                left, values, right = torch.linalg.svd(layer.weight, full_matrices=False)
                layer.weight.copy_(values[0] * left[:, :1] @ right[:1])
        if fault == "ten times too large":
            for parameter in net.parameters():
                parameter.mul_(10)
        if fault == "stale moments":
            for memory in optimizer.state.values():
                memory["exp_avg_sq"].mul_(1e6)
    if fault == "half dead":
        labels = torch.randint(10, labels.shape)
    seen = slice(0, 512) if fault == "half dead" else slice(0, 1000)
    test = seen if fault == "half dead" else slice(1000, 1500)

    def score(net: nn.Module) -> float:
        with torch.no_grad():
            return -functional.cross_entropy(net(inputs[test]), labels[test]).item()

    keep = {"optimizer_state": "keep"} if fault == "stale moments" else {}
    return trial(
        net, optimizer, step, batches=list(zip(inputs[seen].split(32), labels[seen].split(32))), steps=STEPS,
        score=score, initial=start, seed=seed, methods=[*METHODS, "redo"], loss=functional.cross_entropy,
        **{"progress": False, **keep, **options},
    )  # fmt: skip


def counts(fault: str, trials: int) -> dict[str, object]:
    """Return the row of one fault: how often each method was named, and how often the expectation came true."""
    results = [run(fault, seed) for seed in range(trials)]
    named = Counter(result.best for result in results)
    winners, not_ahead = EXPECTED[fault]
    wrong = sum(any(r.gains(m)[:, -1].mean() > r.margin(m) for m in not_ahead) for r in results)
    return {
        "fault": fault,
        "should win": " or ".join(str(name or "nothing decided") for name in winners),
        "did win": sum(named[name] for name in winners),
        "of": trials,
        "named": ", ".join(f"{name or 'nothing'} {count}" for name, count in named.most_common()),
        "ahead though it should not be": wrong if not_ahead else "",
    }


if __name__ == "__main__":
    options = parser(__doc__)
    options.add_argument("fault", nargs="*", default=list(EXPECTED), help=", ".join(EXPECTED))
    options.add_argument("--trials", type=int, default=200)
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(markdown(pd.DataFrame([counts(fault, chosen.trials) for fault in chosen.fault])))
