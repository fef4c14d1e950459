"""What an experiment needs and a user of the library does not: run folders, checkpoints, trunks, seeds."""

from fire_core.runs.record import Run
from fire_core.runs.seeding import generator, numpy_generator, seeded

__all__ = ["Run", "generator", "numpy_generator", "seeded"]
