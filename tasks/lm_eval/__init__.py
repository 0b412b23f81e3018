"""The tasks of lm-evaluation-harness, and custom tasks in its YAML, as tasks of treegen."""
