"""What the next pass computes: spans of prompts, decode steps, guesses to verify."""
