"""Tasks that a model solves by tool calls in an environment."""
