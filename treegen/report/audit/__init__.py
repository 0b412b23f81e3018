"""A second opinion on the score of a finished run: other readers, prompts, samples and data."""
