"""Statistics of scored samples: estimates with intervals, votes, tables and power."""
