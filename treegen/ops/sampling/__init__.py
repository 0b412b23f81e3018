"""Token sampling, with random numbers that depend on the sample alone."""
