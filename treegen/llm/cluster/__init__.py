"""A cluster of workers, each with its own LLM, that share every run; needs Ray."""
