"""A pass as a computation: levels, one decode step, CUDA graphs, and the model runner."""
