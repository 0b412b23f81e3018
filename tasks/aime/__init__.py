"""AIME: competition problems whose answers are whole numbers."""
