"""What the tables of the documents are made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import pandas as pd

from analysis import claims, estimates
from analysis.runs import Results, at_largest_size, at_most, settings


@dataclass(frozen=True)
class Material:
    """What the tables of the documents are made from."""

    results: Results

    @cached_property
    def frame(self) -> pd.DataFrame:
        return estimates.sides(estimates.frame(self.results))

    @cached_property
    def verdicts(self) -> pd.DataFrame:
        return claims.verdicts(self.results)

    @cached_property
    def both(self) -> dict[str, pd.DataFrame]:
        """The verdicts, and what the exploratory seeds alone would say by the same rule."""
        return {"exploratory": claims.verdicts(self.results, "exploring"), "confirmatory": self.verdicts}

    @property
    def planned(self) -> pd.DataFrame:
        """The verdicts that have planned seeds."""
        return self.verdicts[self.verdicts["planned"] > 0]

    def parts(self, *patterns: str) -> list[Results]:
        """Each of these experiments at its largest size up to medium."""
        return settings(at_most(self.results.matching(patterns), "medium"))

    def gaps(self, reference: str, *experiments: str) -> pd.DataFrame:
        """Return the headline comparisons with `reference`, each experiment at its largest size."""
        rows = self.frame[self.frame["headline"] & (self.frame["reference"] == reference)]
        return at_largest_size(rows[rows["experiment"].isin(experiments)])
