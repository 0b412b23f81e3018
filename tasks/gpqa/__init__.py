"""GPQA: graduate-level questions with four choices."""
