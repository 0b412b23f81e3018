"""Many workers, each with an LLM of its own, that share every run; needs Ray."""
