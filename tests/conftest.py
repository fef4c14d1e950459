"""One thread for every test: timings and floating-point sums stay the same on any machine."""

import sys
from contextlib import suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)
# Whenever logging is configured anew, absl (of dm_control) closes the stream that it found at its import: pytest's.
with suppress(ImportError):
    import absl.logging

    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
