"""Solvers for the orthogonal polar factor of batches of matrices: the published iteration, exact and fast ones."""
