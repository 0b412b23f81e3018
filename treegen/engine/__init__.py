"""From a plan to completions: requests, segments, rows and the passes over them."""
