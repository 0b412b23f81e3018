"""What the next pass computes: spans of prompts, decode steps, verification of draft tokens."""
