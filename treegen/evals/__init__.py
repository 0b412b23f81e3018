"""From a task to a finished run directory: what was asked for, drawing, scoring, the report."""
