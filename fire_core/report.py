"""What was done to each target: one row a matrix, changed or skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from torch import Tensor


@dataclass
class Row:
    """What happened to one target. Matrices are (out, in); DfI and SFE are squared Frobenius norms, no unit.

    dfi_after is of the weight as stored, dfi_factor of the orthogonal factor before scaling. residual: DfI of the factor
    as the solver itself measured it (`fire_core.solvers.polar`).
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


class Report:
    """One row per target, changed or skipped.

    The figures are computed when `rows` is first read, from matrices that the report keeps until then.

    Attributes:
        changed: names of the parameters whose values changed, as the treated model names them (without the prefix of a
            DistributedDataParallel around it).
        parameters: those parameters themselves, for `apply_policy(optimizer, "clear_changed", report)`. They are the
            model's own objects, whatever wraps or shards it.
        seconds: time of the treatment. dry_run: nothing was written.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        changed: Iterable[str] = (),
        *,
        parameters: Iterable[Tensor] = (),
        seconds: float = 0.0,
        method: str = "",
        dry_run: bool = False,
        measurements: Iterable[Callable[[], None]] = (),
    ) -> None:
        self._rows = list(rows)
        self._measurements = list(measurements)
        self.changed = set(changed)
        self.parameters = list(parameters)
        self.seconds, self.method, self.dry_run = seconds, method, dry_run

    @property
    def rows(self) -> list[Row]:
        """One per target; the first reading computes the figures."""
        measurements, self._measurements = self._measurements, []
        for measure in measurements:
            measure()
        return self._rows

    def treated(self) -> list[Row]:
        """Rows of the targets that were changed."""
        return [row for row in self.rows if row.dfi_after is not None]

    def summary(self) -> dict[str, float]:
        """Scalars over the treated targets: how many, mean DfI before / after / of the factor, worst factor, SFE."""
        rows = self.treated()
        result: dict[str, float] = {"targets": len(rows), "seconds": self.seconds}
        for key in ("dfi_before", "dfi_after", "dfi_factor", "sfe", "sfe_relative"):
            values = [v for row in rows if (v := getattr(row, key)) is not None]
            if values:
                result[f"{key}_mean"] = sum(values) / len(values)
                result[f"{key}_max"] = max(values)
        return result

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "method": self.method,
            "seconds": self.seconds,
            "changed": sorted(self.changed),
            "summary": self.summary(),
            "rows": [asdict(row) for row in self.rows],
        }

    def __str__(self) -> str:
        head = (
            f"{'target':<44} {'shape':>12} {'DfI before':>11} {'after':>9} {'factor':>9} {'SFE':>9}  action"
        )
        done = "would change (dry run)" if self.dry_run else "changed"
        count = len(self.treated())
        last = f"{self.method or 'report'}: {count} targets {done} in {self.seconds:.3f} s"
        return "\n".join([head, "-" * len(head), *map(_line, self.rows), last])

    @staticmethod
    def merge(reports: Mapping[str, Report], method: str) -> Report:
        """One report of several nets; names become `net.target`, `net.parameter`."""
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
        )


def _line(row: Row) -> str:
    def cell(value: float | None, width: int) -> str:
        return f"{'-' if value is None else f'{value:.3g}':>{width}}"

    shape = "x".join(map(str, row.shape))
    action = row.action if row.dfi_after is not None else f"{row.action}: {row.reason}"
    figures = (
        f"{cell(row.dfi_before, 11)} {cell(row.dfi_after, 9)} {cell(row.dfi_factor, 9)} {cell(row.sfe, 9)}"
    )
    return f"{row.name:<44} {shape:>12} {figures}  {action}"
