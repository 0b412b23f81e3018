"""From a task and a method to a finished run of searches."""
