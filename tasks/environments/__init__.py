"""Environments in treegen's own sandbox."""
