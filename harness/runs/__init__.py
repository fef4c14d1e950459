"""What an experiment needs and a user of the library does not: run folders, checkpoints, trunks, seeds."""

from harness.runs.record import Run
from harness.runs.seeding import generator, numpy_generator, seeded

__all__ = ["Run", "generator", "numpy_generator", "seeded"]
