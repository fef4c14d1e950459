"""The benchmark of the training scripts reads the times that a run of each records."""

import pytest

from benchmarks.speed import RATES, SHORT, measure


def test_rates_are_those_of_the_lines_that_train():
    boundary = {"phase": 1, "boundary_seconds": 9.0}
    epochs = [boundary, *({"phase": 1, "epoch": n, "train_seconds": 2.0} for n in (1, 2, 3))]
    steps = [
        {"phase": p, "epoch": n, "step": s} for p, n, s in ((0, 1, 5), (1, 1, 25), (1, 2, 45), (1, 3, 85))
    ]
    assert RATES["vision"][1](epochs, [{"phase": 1, "step": 5}, *steps]) == [10.0, 20.0]
    tokens = [{"phase": 0, "iteration": n, "tokens_per_second": 100.0 * n} for n in (1, 2)]
    assert RATES["language"][1]([*tokens, boundary], []) == [100.0, 200.0]
    windows = [{"step": n, "updates": u, "seconds": 2.0} for n, u in ((4, 0), (8, 0), (12, 10), (16, 30))]
    assert RATES["dqn"][1]([*windows[:2], boundary, *windows[2:]], []) == [5.0, 10.0]
    turns = [{"phase": 0, "step": n, "seconds": 2.0, "agent_steps": n} for n in (40, 80)]
    assert RATES["sac"][1]([*turns, boundary], []) == [20.0]


@pytest.mark.parametrize(
    "domain", ["sac", *(pytest.param(name, marks=pytest.mark.slow) for name in SHORT if name != "sac")]
)
def test_short_runs_are_measured_as_given(domain):
    more = {
        "vision": ["protocol.epochs=[1,4]"],
        "language": ["phase_1.iterations=12", "phase_1.eval_every=3"],
        "dqn": [
            "experiment=fig4a_catch",
            "total_steps=1200",
            "midpoint=800",
            "learning_starts=80",
            "log_every=200",
        ],
        "sac": ["steps=120", "midpoint=60", "learning_starts=10", "eval_every=20"],
    }[domain]
    if domain == "dqn":
        more += ["eval_every=1200", "replay_capacity=400"]
    row = measure(domain, ["size=smoke", "device=cpu", *more])
    assert (row["domain"], row["size"], row["device"], row["setting"]) == (
        domain,
        "smoke",
        "cpu",
        " ".join(more),
    )
    assert 0 < row["lowest"] <= row["rate"] <= row["highest"] and row["windows"] >= 2
