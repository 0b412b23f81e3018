"""Integrations with other tools: an OpenAI server, lm-eval, Inspect AI, E2B, TRL, and texts."""
