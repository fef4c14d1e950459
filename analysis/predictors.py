"""When does FIRE help? The gain of FIRE over `none`, panel by panel, against what was measured before the boundary.

A panel is one experiment at one size, and its numbers are means over the seeds. The gain is divided by the level of
`none`, so that accuracies, losses and returns can stand together. `errors` predicts the gain of each panel from the
others, with one measure at a time and a straight line, and compares the error with that of their mean.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from analysis import claims, measures
from analysis.rendering import short
from analysis.runs import Results, plain

PREFIXES = ("fig2", "fig3", "fig4", "random_label", "label_noise", "permuted", "pictures", "language_")
PREDICTORS = {
    "dormant": "dormant share before the boundary",
    "rank": "effective rank before (log 10)",
    "dfi": "DfI before / of new weights (log 10)",
    "norm": "weight norm before / of new weights",
    "lost": "full reset minus none, relative",
}


def panels(parts: Sequence[Results]) -> pd.DataFrame:
    """Return one row per setting with runs of `fire` and `none`: domain, gain and the columns PREDICTORS."""
    rows = []
    for part in map(plain, parts):
        measure = measures.of(part)[0]
        ends = measures.values(part.metrics, measure)
        seeds = sorted(set(ends.get("fire", {})) & set(ends.get("none", {})))
        if len(seeds) < 2:
            continue
        none = np.mean([ends["none"][seed] for seed in seeds])
        sign = 1 if measure.higher_is_better else -1
        row = part.first[["experiment", "size", "domain"]].to_dict()
        row["gain"] = sign * (np.mean([ends["fire"][seed] for seed in seeds]) - none) / abs(none)
        gaps = claims.paired(ends, "full_reset", "none", measure.higher_is_better).values()
        row["lost"] = np.mean([gap / abs(none) for gap in gaps]) if gaps else np.nan
        row["dormant"] = _before(part, "dormant_share")
        row["rank"] = np.log10(_before(part, "feature_rank"))
        dfi = _boundary(part, "fire", "common_dfi_before"), _boundary(part, "full_reset", "common_dfi_after")
        row["dfi"] = np.log10(dfi[0] / dfi[1])
        norms = _logged(part, "none", measures.NORM_BEFORE), _logged(part, "full_reset", measures.NORM_AFTER)
        row["norm"] = norms[0] / norms[1]
        rows.append(row)
    return pd.DataFrame(rows, columns=["experiment", "size", "domain", "gain", *PREDICTORS])


def _before(part: Results, metric: str) -> float:
    """Return the mean over the seeds of what `none` measured last before its last boundary."""
    rows = measures.ordered_rows(part.metrics, metric)
    rows = rows[(rows["label"] == "none") & (rows["phase"] < rows["phase"].max())]
    return float(rows.groupby("seed")["value"].last().mean())


def _logged(part: Results, label: str, metric: str) -> float:
    rows = measures.ordered_rows(part.metrics, metric)
    return float(rows[rows["label"] == label].groupby("seed")["value"].last().mean())


def _boundary(part: Results, label: str, column: str) -> float:
    rows = part.boundaries[part.boundaries["label"] == label].sort_values("phase", kind="stable")
    return float(pd.to_numeric(rows.groupby("seed")[column].last()).mean())


def errors(table: pd.DataFrame) -> pd.DataFrame:
    """Return one row per measure with at least five panels: their number, Spearman's correlation with the gain, the
    errors of `unseen_errors` and their ratio, with its lowest and highest value when any one panel is missing."""
    rows = []
    for name, title in PREDICTORS.items():
        known = table[np.isfinite(table[name].astype(float)) & np.isfinite(table["gain"].astype(float))]
        x, y = known[name].to_numpy(float), known["gain"].to_numpy(float)
        if len(x) < 5:
            continue
        error, usual = unseen_errors(x, y)
        fewer = [unseen_errors(np.delete(x, out), np.delete(y, out)) for out in range(len(x))]
        ratios = [line / mean for line, mean in fewer]
        row = {"measure": name, "title": title, "panels": len(x)}
        row |= {"correlation": stats.spearmanr(x, y).statistic, "error": error, "error_of_mean": usual}
        rows.append(row | {"ratio": error / usual, "lowest": min(ratios), "highest": max(ratios)})
    return pd.DataFrame(rows)


def unseen_errors(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Return the root mean squared error in panels left out one at a time, of a line in x and of the mean of y."""
    line, mean = [], []
    for out in range(len(x)):
        rest = np.arange(len(x)) != out
        slope, level = np.polyfit(x[rest], y[rest], 1)
        line.append(y[out] - (slope * x[out] + level))
        mean.append(y[out] - y[rest].mean())
    return float(np.sqrt(np.mean(np.square(line)))), float(np.sqrt(np.mean(np.square(mean))))


def table(found: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `errors` as text."""
    titles = {"title": "measured", "correlation": "rank correlation", "error_of_mean": "error of the mean"}
    titles |= {"lowest": "lowest ratio", "highest": "highest ratio"}
    return found.drop(columns="measure", errors="ignore").rename(columns=titles).map(short)
