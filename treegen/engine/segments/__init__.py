"""Segments in memory: their pages, tables and states, from when they open until they close."""
