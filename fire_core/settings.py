"""The settings of `fire`, checked by name and value before anything is computed, for every way to call it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from fire_core.errors import UserError, did_you_mean
from fire_core.polar import check_solver

SCALES = ("official", "none")
DEGENERATE = ("raise", "skip")


def check_settings(
    *,
    solver: str = "newton_schulz",
    iterations: int = 10,
    normalize: str = "frobenius",
    scale: str = "official",
    strength: float = 1.0,
    degenerate: str = "raise",
    tolerance: float = 1e-8,
    precision: str = "fp32",
    initial: Mapping[str, Any] | None = None,
    **unknown: Any,
) -> None:
    """Raise UserError for a name that `fire` does not know or a value that it cannot use. Same defaults."""
    for name in unknown:
        known = sorted({*(check_settings.__kwdefaults__ or {}), "targets"})
        raise UserError(f"fire has no setting {name!r}{did_you_mean(name, known)}")
    check_solver(solver, iterations, normalize, tolerance, precision)
    if scale not in SCALES:
        raise UserError(f"scale={scale!r}: choose 'official' (sqrt(out/in) / taps) or 'none'")
    if not isinstance(strength, Real) or not 0.0 <= strength <= 1.0:
        raise UserError(f"strength={strength!r} is outside [0, 1]: 0 keeps the weights, 1 is FIRE")
    check_degenerate(degenerate)
    if initial is not None and not isinstance(initial, Mapping):
        raise UserError(
            f"initial is a {type(initial).__name__}: give the starting weights by parameter name, as state_dict() does"
        )


def check_degenerate(degenerate: str) -> None:
    if degenerate not in DEGENERATE:
        raise UserError(f"degenerate={degenerate!r}: choose 'raise' or 'skip'")
