"""Who guesses tokens for the rows, and how many."""
