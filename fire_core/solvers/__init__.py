"""Solvers: the orthogonal polar factor of stacks of matrices, published and exact. Pure functions on tensors."""
