"""Guesses of the tokens that rows draw next, which one pass then verifies at once."""
