"""One thread for every test: timings and floating-point sums stay the same on any machine."""

import json
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)
# Whenever logging is configured anew, absl (of MuJoCo) closes the stream that it found at its import: pytest's.
with suppress(ImportError):
    import absl.logging

    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


@pytest.fixture
def fidelity(request: pytest.FixtureRequest) -> Callable[[str, str, str, float, float], None]:
    """Compare with the official code: `fidelity(kind, row, what, difference, tolerance)` fails if difference > tolerance.
    kind: "method" or "cell"; row: its name; what: the quantity. FIDELITY_RECORD=FILE appends every comparison to FILE."""

    def record(kind: str, row: str, what: str, difference: float, tolerance: float) -> None:
        line = {"kind": kind, "row": row, "what": what, "difference": float(difference)}
        line |= {"tolerance": float(tolerance), "test": request.node.nodeid}
        if path := os.environ.get("FIDELITY_RECORD"):
            with open(path, "a") as file:
                file.write(json.dumps(line) + "\n")
        assert difference <= tolerance, f"{row}, {what}: differs by {difference:.3g}, allowed {tolerance:.3g}"

    return record
