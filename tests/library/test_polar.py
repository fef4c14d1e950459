"""The polar factor against float64 SVD, torch and the published formula; awkward and drawn matrices."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fire_core import UserError
from fire_core.solvers import exact, kernels, schedules
from fire_core.solvers.exact import solve_exact
from fire_core.solvers.polar import STACK_BYTES, Polar, full_precision, polar, polynomial_steps
from tests.polar_cases import deviation, gaussian, oracle, relative_error, spread, with_spectrum


def test_exact_repairs_only_what_fails() -> None:
    good, bad = gaussian(3, 48, 48), with_spectrum(48, 48, spread(48, 6.3))
    together = polar(torch.cat([good, bad[None]]))
    assert torch.equal(together.factor[:3], polar(good).factor) and deviation(together.factor[3]) <= 1e-8
    assert together.iterations[3] > together.iterations[:3].max()


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
@pytest.mark.parametrize("shape", [(64, 64), (37, 20), (192, 192), (9, 3)])
def test_batches_and_their_stacks_do_not_change_the_result(shape, solver, monkeypatch):
    matrices = gaussian(5, *shape)
    whole = polar(matrices, solver)
    monkeypatch.setitem(STACK_BYTES, "cpu", 2 * matrices[0].nbytes)
    cut = polar(matrices, solver)
    assert torch.equal(whole.factor, cut.factor) and torch.equal(whole.iterations, cut.iterations)
    for matrix, factor in zip(matrices if solver == "newton_schulz" else (), whole.factor):
        assert torch.equal(polar(matrix, solver).factor, factor)


def test_type_strides_and_scales_do_not_matter() -> None:
    kernel = gaussian(24, 16, 3, 3).requires_grad_()
    taps, before = kernel.permute(2, 3, 0, 1), kernel.detach().clone()
    result = polar(taps)
    assert torch.equal(result.factor, polar(taps.contiguous()).factor) and torch.equal(kernel, before)
    assert result.residual.shape == (3, 3) and not result.factor.requires_grad
    for dtype in (torch.bfloat16, torch.float16):
        factor = polar(taps.to(dtype)).factor
        assert factor.dtype == torch.float32 and torch.equal(factor, polar(taps.to(dtype).float()).factor)
    matrices = gaussian(3, 24, 24) * torch.tensor([1e30, 1.0, 1e-30]).view(3, 1, 1)
    assert relative_error(polar(matrices).factor, matrices).max() <= 1e-4
    double = polar(matrices.double()).factor
    assert double.dtype == torch.float64 and relative_error(double, matrices).max() <= 1e-11


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
def test_zero_and_non_finite_matrices_are_named(solver: str, value: float) -> None:
    matrices = gaussian(2, 3, 8, 5)
    matrices[1, 2] = 0.0
    matrices[1, 2, 4, 4] = value
    with pytest.raises(UserError, match=r"\(1, 2\) of the batch is (zero|not finite)"):
        polar(matrices, solver)
    for other, setting in ("exact", {"iterations": 5}), ("newton_schulz", {"tolerance": 1e-6}):
        with pytest.raises(UserError, match=f"has no effect with solver='{other}'"):
            polar(matrices, other, **setting)


def test_quintic_is_the_formula_of_muon() -> None:
    matrix = gaussian(48, 32)
    x = (matrix / matrix.norm()).double()
    for _ in range(5):
        gram = x.T @ x
        x = 3.4445 * x + x @ (-4.7750 * gram + 2.0315 * gram @ gram)
    result = polar(matrix, "quintic", iterations=5)
    torch.testing.assert_close(result.factor.double(), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(result.residual.double(), deviation(x), rtol=1e-4, atol=0)


def test_the_completion_is_the_nearest_to_the_identity() -> None:
    """Between the null spaces, it is the polar factor of what the identity has there (Procrustes). Of W = e1 e2^T that is
    zero between them, e2 -> e1, so the second reference decides."""
    matrix = gaussian(20, 5) @ gaussian(5, 12, seed=1)
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=True)
    between = oracle(left[:, 5:].mT @ torch.eye(20, 12, dtype=torch.float64) @ right[5:].mT)
    expected = left[:, :5] @ right[:5] + left[:, 5:] @ between @ right[5:]
    torch.testing.assert_close(polar(matrix).factor.double(), expected, rtol=0, atol=1e-5)
    matrix = torch.tensor([[0.0, 5.0], [0.0, 0.0]])
    factor = polar(matrix).factor
    assert factor[0, 1] == 1.0 and factor[1, 0].abs() == 1.0
    assert torch.equal(factor, polar(matrix).factor)


DRAWS = settings(max_examples=40, deadline=None, derandomize=True)


@st.composite
def matrices(draw: st.DrawFn, decades: float, most: int = 60) -> Tensor:
    """Any shape up to most x most, condition number up to 10^decades: one small value, an even spread, one large."""
    rows, columns = draw(st.integers(1, most)), draw(st.integers(1, most))
    steps = torch.linspace(0, 1, min(rows, columns), dtype=torch.float64)
    singular = 10 ** (-draw(st.floats(0, decades)) * steps ** draw(st.sampled_from([100.0, 1.0, 0.01])))
    return with_spectrum(rows, columns, singular, seed=draw(st.integers(0, 10**6)))


def check_against_the_svd(matrices: Tensor, result: Polar, most: float = 1e5) -> None:
    """Orthogonal whatever the condition, and near the SVD's factor as far as float32 input determines that."""
    assert deviation(result.factor).max() <= 1e-8 and result.residual.max() <= 1e-8
    assert result.factor.dtype == torch.float32 and result.factor.shape == matrices.shape
    singular = torch.linalg.svdvals(matrices.double())
    condition = float((singular[..., 0] / singular[..., -1]).max())
    if condition <= most:  # float32 rounding of the input alone moves the factor by about eps * condition
        assert relative_error(result.factor, matrices).max() <= 1e-5 + 2e-7 * condition
        assert not result.completed.any()


@DRAWS
@given(matrices(decades=12.0))
def test_exact_is_the_factor_of_the_svd(matrix: Tensor) -> None:
    check_against_the_svd(matrix, polar(matrix))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(max_examples=10_000, deadline=None, derandomize=True)
@given(matrices(decades=8.0, most=300))
def test_ten_thousand_matrices_up_to_condition_1e8(matrix: Tensor) -> None:
    check_against_the_svd(matrix, polar(matrix))


@DRAWS
@given(st.integers(1, 12), st.integers(1, 12), st.data(), st.sampled_from(["newton_schulz", "exact"]))
def test_finite_entries_never_give_nan(rows: int, columns: int, data: st.DataObject, solver: str) -> None:
    entry = st.one_of(st.just(0.0), st.floats(-(2.0**127), 2.0**127, width=32))
    entries = data.draw(st.lists(entry, min_size=rows * columns, max_size=rows * columns).filter(any))
    result = polar(torch.tensor(entries).view(rows, columns), solver)
    assert result.factor.isfinite().all()
    if solver == "exact":
        assert result.residual <= 1e-8


def test_the_table_of_norms_is_what_the_solver_gives() -> None:
    text = (Path(__file__).parents[2] / "docs/concepts/solvers.md").read_text()
    matrices = gaussian(20, 64, 64)
    for norm in ("frobenius", "spectral"):
        (row,) = (line for line in text.splitlines() if f"64 x 64 | {norm}" in line.lower()[2:])
        for steps, value in zip((5, 10, 15, 20), map(float, row.split("|")[3:7]), strict=True):
            measured = polar(matrices, "newton_schulz", iterations=steps, normalize=norm).residual.median()
            assert value / 3 < float(measured) < 3 * value or max(value, float(measured)) < 1e-3


def test_the_schedules_of_the_solver_cover_what_their_comments_say() -> None:
    square = (exact.LIFT, exact.SETTLE), exact.FINISH
    for (steps, last), lower in ((square, 3e-3), ((exact.TRIANGLE_RATIONAL, schedules.CUBIC), 0.04)):
        values = np.geomspace(lower, 1, 200001)
        for step in steps:
            values = schedules.rational_value(values, step)
        assert abs(schedules.polynomial_value(values, last) - 1).max() <= 1e-6


@pytest.mark.parametrize("solver", ["newton_schulz", "exact"])
def test_global_precision_settings_change_no_bit_and_are_put_back(solver: str) -> None:
    matrices = gaussian(2, 64, 64)
    expected = polar(matrices, solver).factor
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            factor = polar(matrices, solver).factor
        with pytest.raises(ZeroDivisionError), full_precision(torch.device("cpu")):
            assert not torch.backends.cuda.matmul.allow_tf32  # reading it raises where the switches disagree
            _ = 1 / 0
        assert torch.get_float32_matmul_precision() == "medium" and torch.backends.cuda.matmul.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(factor, expected)


@pytest.fixture(params=["cpu", "gpu"])
def rational(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether steps are rational: on a CPU, in blocks. On a GPU they are polynomial, on whole matrices."""
    if request.param == "gpu":
        monkeypatch.setattr(kernels, "works_in_blocks", lambda device: False)
    return request.param == "cpu"


@pytest.mark.parametrize("shape", [(16, 16), (64, 64), (200, 180), (192, 192), (300, 100), (90, 3)])
@pytest.mark.parametrize("decades", [0.0, 1.0, 3.0, 4.5, 6.0])
def test_exact_on_both_iterations(rational: bool, shape: tuple[int, int], decades: float) -> None:
    matrices = torch.stack([with_spectrum(*shape, spread(shape[1], decades), seed) for seed in (1, 2)])
    solved = solve_exact(matrices, 1e-8, rational)
    check_against_the_svd(matrices, solved, most=1.1e6)
    assert (solved.iterations > 0).all()
    if shape[0] > 2 * shape[1] and decades <= 1.0:  # an iteration on the Gram matrix is enough
        assert (solved.iterations <= 5).all()


def test_values_far_from_one_are_set_and_the_vectors_stay(rational: bool) -> None:
    """A few far ones among many near 1; a crowd that does not fit into a room of 16; rows that sum to nothing."""
    few = torch.cat([torch.linspace(0.99, 1.01, 60), torch.tensor([0.7, 0.3, 0.05, 0.002])])
    crowd = torch.cat([torch.ones(24), torch.linspace(0.95, 0.7, 40)])
    singular = gaussian(64, 64, seed=5)
    singular[-1] = -singular[:-1].sum(0)
    matrices = torch.stack([with_spectrum(64, 64, few), with_spectrum(64, 64, crowd), singular])
    factors = solve_exact(matrices, 1e-8, rational).factor
    assert deviation(factors).max() <= 1e-8 and relative_error(factors[:2], matrices[:2]).max() <= 2e-5


@pytest.mark.parametrize(
    "rows, columns, rank", [(30, 30, 1), (64, 64, 6), (64, 64, 63), (192, 192, 20), (200, 40, 7), (3, 2, 1)]
)
def test_lost_rank_is_completed_and_named(rational: bool, rows: int, columns: int, rank: int) -> None:
    """By the nearest: <Q, W> is the sum of the singular values, which no orthogonal matrix exceeds."""
    matrix = gaussian(rows, rank) @ gaussian(rank, columns, seed=1)
    solved = solve_exact(torch.stack([gaussian(rows, columns, seed=3), matrix]), 1e-8, rational)
    assert solved.completed.tolist() == [False, True] and deviation(solved.factor).max() <= 1e-8
    total = torch.linalg.svdvals(matrix.double()).sum()
    assert (solved.factor[1].double() * matrix).sum() >= total * (1 - 1e-6)


@pytest.mark.parametrize("shape", [(192, 192), (400, 192)])
def test_an_even_spread_over_four_decades_takes_few_steps(rational: bool, shape: tuple[int, int]) -> None:
    solved = solve_exact(with_spectrum(*shape, spread(192, 4.0)).unsqueeze(0), 1e-8, rational)
    assert solved.iterations.item() == (4 if rational else 10) and deviation(solved.factor) <= 1e-8


@pytest.mark.parametrize("shape", [(64, 64), (300, 100), (1500, 60)])
@pytest.mark.parametrize("times_eps", [0.0, 0.75, 1.5])
def test_rank_of_plateaus_is_decided_as_float64_decides_it(rational, shape, times_eps):
    """One large value, all others at 2e-6 but the last: nearly all of it takes both passes."""
    values = torch.full((shape[1],), 2e-6, dtype=torch.float64)
    values[0], values[-1] = 1.0, times_eps * torch.finfo(torch.float32).eps
    matrix = with_spectrum(*shape, values)
    lost = torch.linalg.svdvals(matrix.double())
    solved = solve_exact(matrix.unsqueeze(0), 1e-8, rational)
    assert bool(solved.completed) == bool(lost[-1] <= torch.finfo(torch.float32).eps * lost[0])


def test_matrices_of_full_rank_need_no_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "polar_by_svd", None)
    for seed, smallest in enumerate((1e-4, 1e-5, 1e-6)):
        values = 0.1 + 0.9 * torch.rand(100, generator=torch.Generator().manual_seed(seed))
        values[-1] = smallest
        order = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        result = polar(torch.diag(values)[order])
        torch.testing.assert_close(result.factor, torch.eye(100)[order], rtol=0, atol=1e-5 + 2e-7 / smallest)
    # falling off evenly to 1e-6, beyond the few values that are set in one stroke
    assert polar(with_spectrum(192, 192, spread(192, 6.0))).residual <= 1e-8


@pytest.mark.parametrize("steps", [(schedules.CUBIC,) * 2, schedules.quintic_schedule(0.1, 1e-2)])
def test_the_fixed_step_kernel_compiles_without_a_graph_break(steps: tuple) -> None:
    matrices = gaussian(3, 24, 16) / 10
    compiled = torch.compile(lambda x: polynomial_steps(x, steps), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(matrices), polynomial_steps(matrices, steps))
