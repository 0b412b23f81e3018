"""Linear layers computed in another way: in FP8, joined, gated."""
