"""Solvers for the orthogonal polar factor of batches of matrices: the published iteration, Muon's, and the exact one."""
