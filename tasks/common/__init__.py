"""What several tasks use: rows of a file, numbers in a text."""
