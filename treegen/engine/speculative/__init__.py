"""Speculative decoding: which drafter a run uses, and which draft tokens a step verifies."""
