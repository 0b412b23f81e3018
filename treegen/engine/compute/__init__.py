"""Passes as computations: levels, one decode step, CUDA graphs, and who runs them."""
