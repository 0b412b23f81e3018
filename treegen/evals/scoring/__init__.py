"""Samples judged and summed up: scores, verifiers, votes, results.json."""
