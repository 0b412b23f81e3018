"""Plans: which prompt segments are stored once, which are read once, and why. Needs no torch."""
