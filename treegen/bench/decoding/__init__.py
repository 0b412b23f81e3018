"""Decoding measured: workloads in several modes, beside their roofline."""
