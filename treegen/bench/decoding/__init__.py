"""Decoding benchmarks: workloads in several modes, compared with their rooflines."""
