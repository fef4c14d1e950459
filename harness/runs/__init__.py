"""Run folders, checkpoints, trunks and random generators of experiments."""

from harness.runs.record import Run
from harness.runs.seeding import generator, numpy_generator, seeded

__all__ = ["Run", "generator", "numpy_generator", "seeded"]
