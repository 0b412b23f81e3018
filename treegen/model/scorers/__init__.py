"""Models that judge texts: reward models and verifiers."""
