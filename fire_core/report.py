"""What was done to each target: one row a matrix, changed or skipped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from fire_core.phases import State


@dataclass
class Row:
    """What happened to one target. Matrices are (out, in); DfI and SFE are squared Frobenius norms, no unit.

    residual: DfI of the factor as the solver itself measured it (`fire_core.polar`).
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


@dataclass
class Report:
    """One row a target, changed or skipped. `dfi_after` is of the weight as stored, `dfi_factor` before scaling."""

    rows: list[Row] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
    seconds: float = 0.0
    method: str = ""

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

    def parameters(self, state: State) -> list[nn.Parameter]:
        """The changed parameters themselves, for `apply_policy(..., "clear_changed", ...)`."""
        return [
            parameter
            for net_name, net in state.nets.items()
            for name, parameter in net.named_parameters()
            if f"{net_name}.{name}" in self.changed
        ]

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
        lines = [head, "-" * len(head), *map(_line, self.rows)]
        s = self.summary()
        lines.append(f"{self.method or 'report'}: {s['targets']:.0f} targets changed in {self.seconds:.3f} s")
        return "\n".join(lines)

    @staticmethod
    def merge(reports: Mapping[str, Report], method: str) -> Report:
        """One report of several nets; names become `net.target`, `net.parameter`."""
        merged = Report(method=method, seconds=sum(r.seconds for r in reports.values()))
        for net, report in reports.items():
            merged.changed |= {f"{net}.{name}" for name in report.changed}
            for row in report.rows:
                values = asdict(row) | {"name": f"{net}.{row.name}", "parameter": f"{net}.{row.parameter}"}
                merged.rows.append(Row(**values))
        return merged


def _line(row: Row) -> str:
    def cell(value: float | None, width: int) -> str:
        return f"{'-' if value is None else f'{value:.3g}':>{width}}"

    shape = "x".join(map(str, row.shape))
    action = row.action if row.dfi_after is not None else f"{row.action}: {row.reason}"
    figures = (
        f"{cell(row.dfi_before, 11)} {cell(row.dfi_after, 9)} {cell(row.dfi_factor, 9)} {cell(row.sfe, 9)}"
    )
    return f"{row.name:<44} {shape:>12} {figures}  {action}"
