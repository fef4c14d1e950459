"""Measures of plasticity: pure functions on tensors, and a probe that applies them to a network."""
