"""Nodes of a search as segments and requests of a running scheduler."""
