"""Measures of plasticity: pure functions on tensors, and one probe that applies them to a network."""
