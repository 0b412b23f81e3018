"""What is computed and stored once, what is read once, and why; without torch."""
