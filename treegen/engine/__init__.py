"""The engine, from a plan to completions: requests, segments, rows and passes."""
