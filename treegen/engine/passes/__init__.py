"""Passes: spans of prompts, decode steps, and verification of draft tokens."""
