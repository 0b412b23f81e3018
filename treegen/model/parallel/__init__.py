"""One model in several processes: its parts, and what they exchange."""
