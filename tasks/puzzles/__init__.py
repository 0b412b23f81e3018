"""Number puzzles that are solved in steps: countdown and the game of 24."""
