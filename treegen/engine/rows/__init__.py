"""Rows: samples being decoded, their tokens and states, and which go into the next step."""
