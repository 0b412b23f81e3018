"""Segments in memory: their pages, page tables, states and cached prefixes."""
