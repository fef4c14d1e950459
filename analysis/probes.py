"""The probes beside the paper's protocols: accuracy over the phases where continued training loses
plasticity.

    python -m analysis.probes --root runs [--size small]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from analysis import style
from analysis.figure import figure_command
from analysis.load import Results
from analysis.summary import draw_summary

PROBES = ("random_label", "label_noise", "permuted")


def draw(parts: list[Results], paper_curves: bool) -> style.Figure:
    """One panel a probe; the paper has no such curves."""
    return draw_summary(parts)


def main(given: Sequence[str] | None = None) -> int:
    return figure_command("probes", __doc__, PROBES, draw, given)


if __name__ == "__main__":
    sys.exit(main())
