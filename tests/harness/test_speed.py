"""The benchmark of the training scripts reads the times that a run of each records."""

from benchmarks.speed import RATES


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
