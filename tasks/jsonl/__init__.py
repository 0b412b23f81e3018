"""Questions and answers from a file, without code."""
