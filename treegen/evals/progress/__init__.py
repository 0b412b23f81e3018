"""Progress, usage and timeline of a run."""
