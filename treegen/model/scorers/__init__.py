"""Models that score texts: reward models and verifiers."""
