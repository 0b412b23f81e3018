"""Scoring of samples: verdicts, verifier scores, votes and results.json."""
