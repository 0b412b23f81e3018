"""Integrations with other tools: an OpenAI server, lm-eval, Inspect AI, TRL, and files of texts."""
