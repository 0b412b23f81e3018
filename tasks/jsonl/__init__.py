"""Questions and answers from a file; no code needed."""
