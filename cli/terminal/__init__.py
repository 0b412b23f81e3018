"""Terminal output: lines, progress, flags in messages, and signals."""
