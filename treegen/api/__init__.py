"""Runs judged by models: the call that judges them, and its tables."""
