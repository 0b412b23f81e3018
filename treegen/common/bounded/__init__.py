"""Templates and patterns from files, run in processes with limits on time and memory."""
