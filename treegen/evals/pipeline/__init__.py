"""From settings to finished runs: targets, execution, saving."""
