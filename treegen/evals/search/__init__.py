"""From a task and a method to a finished search run."""
