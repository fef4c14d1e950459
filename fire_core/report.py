"""The report of a treatment: one row per target, changed or skipped, with figures of the matrix before and after."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor

from fire_core.columns import columns
from fire_core.targets.table import left_out


@dataclass
class Row:
    """What happened to one target, of shape (out, in). A figure that is undefined or was not measured is None.

    Args:
        action, reason: what was done, "skipped", or "left out" where it is not known how the weight is cut; and why.
        dfi_before, dfi_after: deviation from isometry, `||W^T W - I||_F^2`, of the weight as stored (smaller Gram matrix).
        dfi_factor: the same for the orthogonal factor before scaling.
        sfe: squared Frobenius distance that the weight moved.
        sfe_relative: `sfe` divided by the squared distance between the old and the starting weight.
        norm_before, norm_after: Frobenius norm of the weight.
        iterations, completed: figures of the solver (see `Polar`).
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


@dataclass
class Report:
    """The rows of a treatment, one per target, and the parameters that it changed.

    Attributes:
        rows: one per target.
        changed: names of the parameters whose values changed. `fire` and the controls leave out the prefix of a
            DistributedDataParallel around the model.
        parameters: those parameters themselves, for `reset_optimizer_state(optimizer, "clear_changed", report)`. They are
            the model's own objects, whatever wraps or shards it.
        seconds: time of the treatment. method: name of the method.
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
        return sum(prod(row.shape) for row in self.treated()) / self.total if self.total else None

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
            if values := [v for row in rows if (v := getattr(row, key)) is not None]:
                result |= {f"{key}_mean": sum(values) / len(values), f"{key}_max": max(values)}
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
        head, rows = ("target", "shape", "DfI before", "after", "factor", "SFE", "action"), []
        for row in self.rows:
            action = row.action if row.dfi_after is not None else f"{row.action}: {row.reason}"
            cells = (row.name, row.shape, row.dfi_before, row.dfi_after, row.dfi_factor, row.sfe, action)
            rows.append(dict(zip(head, cells)))
        count = len(self.treated())
        done = "would change (dry run)" if self.dry_run else "changed"
        share = "" if self.share is None else f", {self.share:.1%} of {self.total:,} parameters"
        last = f"{self.method or 'report'}: {count} targets {done} in {self.seconds:.3f} s{share}"
        unclear = [row for row in self.rows if row.action == "left out"]
        return f"{columns(rows)}\n{last}{left_out(unclear, self.rows)}"

    @staticmethod
    def merge(reports: Mapping[str, "Report"], method: str) -> "Report":
        """Return one report of several nets; names become `net.target` and `net.parameter`."""
        merged = Report(method=method)
        for net, report in reports.items():
            for row in report.rows:
                merged.rows.append(replace(row, name=f"{net}.{row.name}", parameter=f"{net}.{row.parameter}"))
            merged.changed |= {f"{net}.{name}" for name in report.changed}
            merged.parameters += report.parameters
            merged.seconds += report.seconds
            merged.total += report.total
        return merged
