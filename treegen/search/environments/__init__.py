"""Environments of agents: what a model's tool calls act on, forked together with its context."""
