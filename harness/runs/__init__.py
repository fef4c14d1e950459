"""Run folders, checkpoints, trunks and random generators of experiments."""

from harness.runs.run import Run
from harness.runs.seeding import NumpyStreams, generator, numpy_generator, seeded

__all__ = ["NumpyStreams", "Run", "generator", "numpy_generator", "seeded"]
