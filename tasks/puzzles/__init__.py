"""Number puzzles that are solved in steps: countdown, game of 24."""
