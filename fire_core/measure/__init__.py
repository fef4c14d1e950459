"""Measures of plasticity: pure functions on tensors, and functions that apply them to a network."""
