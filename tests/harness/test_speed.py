"""The benchmark of the training scripts turns the times and counts that a run records into rates."""

from benchmarks.speed import rates


def test_rates_are_those_of_the_windows_in_which_the_count_grows():
    windows = [{"step": n, "updates": u, "seconds": 2.0} for n, u in ((4, 0), (8, 0), (12, 10), (16, 30))]
    boundary = {"phase": 1, "boundary_seconds": 9.0}
    assert rates("updates", [*windows[:2], boundary, *windows[2:]]) == [5.0, 10.0]
