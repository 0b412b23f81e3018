"""From what was asked for to finished runs: where they go, what they lack, and drawing it."""
