"""Measurements as CSV files in analysis/results in which every line names its machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.runs import RESULTS
from fire_core.files import write_atomic
from harness.runs.machine import describe


def merge(name: str, rows: Sequence[dict[str, Any]], key: Sequence[str]) -> Path:
    """Write `rows` into analysis/results/`name`.csv over all lines with the same values under `key`; return the path.

    Each new line gets the version of torch, commit, hardware and time. The file is replaced in one step.
    """
    about = describe()
    machine = {name: about[name] for name in ("commit", "hardware", "started")}
    machine = {"torch": about["versions"]["torch"]} | machine
    path = RESULTS / f"{name}.csv"
    cells = [{column: "" if value is None else str(value) for column, value in row.items()} for row in rows]
    fresh = pd.DataFrame(cells).assign(**machine).fillna("")
    older = pd.read_csv(path, dtype=str, keep_default_na=False) if path.exists() else fresh[:0]
    renewed = pd.MultiIndex.from_frame(fresh[list(key)])
    kept = older[~pd.MultiIndex.from_frame(older.reindex(columns=list(key), fill_value="")).isin(renewed)]
    table = pd.concat([kept, fresh]).fillna("")
    columns = [column for column in table if column not in machine]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, table[[*columns, *machine]].to_csv(index=False, lineterminator="\r\n"))
    return path
