"""From a task to a finished run directory: settings, sampling, scoring and the report."""
