"""Templates and patterns that files bring: run in processes with limits on time and memory."""
