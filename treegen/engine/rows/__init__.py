"""Rows: samples being decoded, with their tokens, states, grammars and scheduling."""
