"""One thread for every test: timings and floating-point sums stay the same on any machine."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
torch.set_num_threads(1)
