"""Tensor parallelism: the shards of one model in several processes, and their collectives."""
