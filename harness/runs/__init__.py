"""What an experiment needs and a user of the library does not: run folders, checkpoints, trunks, seeds."""

from fire_core.seeding import generator, numpy_generator, seeded
from harness.runs.record import Run

__all__ = ["Run", "generator", "numpy_generator", "seeded"]
