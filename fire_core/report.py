"""The report of a treatment: one row per target, changed or skipped, with figures of the matrix before and after."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fire_core.columns import columns
from fire_core.measure.metrics import (
    deviation_from_isometry,
    relative_squared_error,
    smaller_gram,
    squared_frobenius_error,
)
from fire_core.solvers.kernels import deviation_of_gram
from fire_core.targets.table import left_out


@dataclass
class Row:
    """What happened to one target, of shape (out, in). A figure that is undefined or was not measured is None.

    Args:
        action: what was done, "skipped", or "left out" where it is not known how the weight is cut.
        reason: why the target was skipped, or why it was included.
        dfi_before, dfi_after: deviation from isometry, `||W^T W - I||_F^2`, of the weight as stored. The Gram matrix is
            the smaller of the two.
        dfi_factor: the same for the orthogonal factor before scaling.
        sfe: squared Frobenius distance that the weight moved.
        sfe_relative: `sfe` divided by the squared distance between the old and the starting weight.
        norm_before, norm_after: Frobenius norm of the weight.
        iterations, completed: figures of the solver (see `Polar`).
        residual: DfI of the factor as the solver measured it, or `dfi_factor` if it did not.
    """

    name: str
    parameter: str
    shape: tuple[int, ...]
    action: str
    reason: str = ""
    dfi_before: float | None = None
    dfi_after: float | None = None
    dfi_factor: float | None = None
    sfe: float | None = None
    sfe_relative: float | None = None
    norm_before: float | None = None
    norm_after: float | None = None
    iterations: int | None = None
    completed: bool | None = None
    residual: float | None = None


class Treated(NamedTuple):
    """New values of a stack of matrices (count, out, in), with the figures (count,) of the solver where it has any.

    factor: the orthogonal factor before scaling (count, out, in), if there is one. scale: (count, 1, 1), given instead
    of `factor` where `matrices` = scale * factor.
    """

    matrices: Tensor
    factor: Tensor | None = None
    iterations: Tensor | None = None
    completed: Tensor | None = None
    residual: Tensor | None = None
    scale: Tensor | None = None

    def as_stored(self, dtype: torch.dtype) -> Treated:
        """Return the result rounded to `dtype`; its `factor` keeps the values before rounding."""
        if self.matrices.dtype == dtype:
            return self
        rounded = self
        if self.scale is not None:
            rounded = self._replace(factor=self.matrices / self.scale, scale=None)
        return rounded._replace(matrices=self.matrices.to(dtype).to(self.matrices.dtype))


@dataclass
class Report:
    """The rows of a treatment, one per target, and the parameters that it changed.

    Attributes:
        rows: one per target.
        changed: names of the parameters whose values changed. `fire` and the controls leave out the prefix of a
            DistributedDataParallel around the model.
        parameters: those parameters themselves, for `reset_optimizer_state(optimizer, "clear_changed", report)`. They are
            the model's own objects, whatever wraps or shards it.
        seconds: time of the treatment.
        method: name of the method.
        dry_run: whether the report is that of a dry run, which writes nothing.
        total: number of entries of all parameters of the model, for `share`.
    """

    rows: list[Row] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    parameters: list[Tensor] = field(default_factory=list, kw_only=True, compare=False)
    seconds: float = field(default=0.0, kw_only=True)
    method: str = field(default="", kw_only=True)
    dry_run: bool = field(default=False, kw_only=True)
    total: int = field(default=0, kw_only=True)

    @property
    def share(self) -> float | None:
        """Share of all entries of the model's parameters that are in treated matrices; None if their number is unknown."""
        treated = sum(prod(row.shape) for row in self.treated())
        return treated / self.total if self.total else None

    def treated(self) -> list[Row]:
        """Return the rows of the matrices that were changed, or would be in a dry run."""
        return [row for row in self.rows if row.dfi_after is not None]

    def summary(self) -> dict[str, float]:
        """Return scalars over the treated rows: "targets" (their number), "seconds", and means and maxima of figures.

        These are "<figure>_mean" and "<figure>_max" of `dfi_before`, `dfi_after`, `dfi_factor`, `sfe` and
        `sfe_relative`, without the figures that no row has.
        """
        rows = self.treated()
        result: dict[str, float] = {"targets": len(rows), "seconds": self.seconds}
        for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe", "sfe_relative"):
            values = [v for row in rows if (v := getattr(row, key)) is not None]
            if values:
                result[f"{key}_mean"] = sum(values) / len(values)
                result[f"{key}_max"] = max(values)
        return result

    def to_dict(self) -> dict[str, Any]:
        """Return method, seconds, changed names, summary and rows as plain values, ready for JSON."""
        return {
            "method": self.method,
            "seconds": self.seconds,
            "changed": sorted(self.changed),
            "share": self.share,
            "summary": self.summary(),
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        rows = [
            {
                "target": row.name,
                "shape": row.shape,
                "DfI before": row.dfi_before,
                "after": row.dfi_after,
                "factor": row.dfi_factor,
                "SFE": row.sfe,
                "action": row.action if row.dfi_after is not None else f"{row.action}: {row.reason}",
            }
            for row in self.rows
        ]
        done = "would change (dry run)" if self.dry_run else "changed"
        count = len(self.treated())
        last = f"{self.method or 'report'}: {count} targets {done} in {self.seconds:.3f} s"
        if self.share is not None:
            last += f", {self.share:.1%} of {self.total:,} parameters"
        unclear = [row for row in self.rows if row.action == "left out"]
        return f"{columns(rows)}\n{last}{left_out(unclear, self.rows)}"

    @staticmethod
    def merge(reports: Mapping[str, Report], method: str) -> Report:
        """Return one report of several nets; names become `net.target` and `net.parameter`."""
        return Report(
            [
                replace(row, name=f"{net}.{row.name}", parameter=f"{net}.{row.parameter}")
                for net, report in reports.items()
                for row in report.rows
            ],
            {f"{net}.{name}" for net, report in reports.items() for name in report.changed},
            parameters=[parameter for report in reports.values() for parameter in report.parameters],
            seconds=sum(report.seconds for report in reports.values()),
            method=method,
            total=sum(report.total for report in reports.values()),
        )


def figures_of(old: Tensor, treated: Treated, initial: Tensor | None) -> dict[str, Tensor]:
    """Return the figures (count,) of a stack, by the names of the fields of `Row`, without any transfer from the device.

    old, initial: (count, out, in), before the treatment and at the start.
    """
    new = treated.matrices
    gram = smaller_gram(new)
    of_factor = None if treated.factor is None else deviation_from_isometry(treated.factor)
    if treated.scale is not None:
        of_factor = deviation_of_gram(gram / treated.scale.square())
    columns = {
        "dfi_before": deviation_from_isometry(old),
        "dfi_after": deviation_of_gram(gram),
        "dfi_factor": of_factor,
        "sfe": squared_frobenius_error(old, new),
        "norm_before": torch.linalg.matrix_norm(old),
        "norm_after": torch.linalg.matrix_norm(new),
        "iterations": treated.iterations,
        "completed": treated.completed,
        "residual": treated.residual,
    }
    if initial is not None:
        columns["sfe_relative"] = relative_squared_error(old, new, initial.to(old))
    return {name: column for name, column in columns.items() if column is not None}


def fill_in(figures: Iterable[tuple[list[Row], dict[str, Tensor]]]) -> None:
    """Write the figures of stacks into the rows of their matrices."""
    for rows, known in figures:
        values = torch.stack([column.double() for column in known.values()], dim=1).tolist()
        for row, numbers in zip(rows, values, strict=True):
            for name, value in zip(known, numbers, strict=True):
                if value == value:  # NaN: not defined
                    setattr(row, name, value)
            row.iterations = None if row.iterations is None else int(row.iterations)
            row.completed = None if row.completed is None else bool(row.completed)
            row.residual = row.dfi_factor if row.residual is None else row.residual
