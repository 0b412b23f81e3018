"""Multiple choice in 57 subjects (MMLU)."""
