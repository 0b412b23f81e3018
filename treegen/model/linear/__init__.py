"""Replacements for linear layers: FP8, MXFP4, merged, gated, batch invariant, experts."""
