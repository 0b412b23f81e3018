"""Operators without state: attention, recurrent layers, sampling, and the paged KV cache."""
