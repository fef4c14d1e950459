"""The settings of `fire`: their names, types, defaults and allowed values."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, Literal

from fire_core.errors import UserError, check_word, did_you_mean
from fire_core.solvers.polar import Normalize, Precision, Solver, check_solver

Scale = Literal["official", "none", "initial"]
Degenerate = Literal["raise", "skip"]

STAGE_LIMIT = 4 * 2**30


@dataclass(frozen=True)
class FireSettings:
    """All settings of `fire` except the choice of matrices. Wrong values raise UserError when the object is created.

    Args:
        solver: "newton_schulz" is the published algorithm, `iterations` cubic steps. It is *not* a projection to a
            tolerance: read `dfi_factor` in the report. "exact" is the orthogonal polar factor to `tolerance`. "fast" is
            usually closer than the published 10 iterations, in less time. "quintic" is Muon's iteration, inexact by design:
            after about ten steps singular values lie in a band from 0.68 to 1.21, not at 1 (see `polar`).
        iterations: number of steps of newton_schulz and quintic; the other solvers accept the default only.
        normalize: the norm by which newton_schulz and quintic divide at the start, "frobenius" (published) or
            "spectral"; the other solvers accept the default only.
        scale: the number by which the orthogonal factor is multiplied. "official" is sqrt(out / in), divided by the
            number of taps for convolutions; "none" is 1; "initial" gives each matrix its Frobenius norm at
            initialisation.
        variance_factor: with scale="initial", the mean square of the result's entries as a multiple of that at
            initialisation; 1 is the initial norm itself.
        strength: the result is W + strength * (fire(W) - W); 1 is FIRE.
        degenerate: what to do with zero matrices and those below `min_norm`. "raise" names them before anything is
            changed; "skip" leaves them as they are, with the reason in the report. NaN and infinite weights always
            raise.
        min_norm: Frobenius norm below which a matrix counts as degenerate.
        tolerance: DfI that "exact" guarantees per matrix, times max(1, n / 768) where n is the smaller side.
        precision: "fp32", or "tf32" (see `polar`), whatever type the weights are stored in.
        stage_limit: bytes of target weights, at 4 bytes a weight. Up to this size, results are written when all of them
            are computed and checked, and the report measures when it is first read; above it, each stack of matrices is
            written and measured at once.
    """

    solver: Solver = "newton_schulz"
    iterations: int = 10
    normalize: Normalize = "frobenius"
    scale: Scale = "official"
    variance_factor: float = 1.0
    strength: float = 1.0
    degenerate: Degenerate = "raise"
    min_norm: float = 0.0
    tolerance: float = 1e-8
    precision: Precision = "fp32"
    stage_limit: float = STAGE_LIMIT

    def __post_init__(self) -> None:
        check_solver(self.solver, self.iterations, self.normalize, self.tolerance, self.precision)
        check_word("scale", self.scale, Scale)
        check_word("degenerate", self.degenerate, Degenerate)
        if not isinstance(self.strength, Real) or not 0.0 <= self.strength <= 1.0:
            raise UserError(f"strength={self.strength!r} is outside [0, 1]: 0 keeps the weights, 1 is FIRE")
        factor = self.variance_factor
        if not isinstance(factor, Real) or not 0.0 < factor < math.inf:
            raise UserError(f"variance_factor={factor!r} must be a number above 0")
        if factor != 1.0 and self.scale != "initial":
            raise UserError(
                f"variance_factor={factor!r} has no effect with scale={self.scale!r}: choose scale='initial'"
            )
        for name in ("min_norm", "stage_limit"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not value >= 0.0:
                raise UserError(f"{name}={value!r} must be a number, 0 or above")
        for name in ("iterations", "normalize"):
            value = getattr(self, name)
            if self.solver in ("exact", "fast") and value != getattr(FireSettings, name):
                raise UserError(
                    f"{name}={value!r} has no effect with solver={self.solver!r}: leave it out, or choose newton_schulz"
                )

    @classmethod
    def of(cls, **settings: Any) -> FireSettings:
        """Return the settings given by name. Raises UserError for an unknown name, with the nearest known one."""
        known = [field.name for field in fields(cls)]
        for name in settings:
            if name not in known:
                raise UserError(f"fire has no setting {name!r}{did_you_mean(name, [*known, 'targets'])}")
        return cls(**settings)
