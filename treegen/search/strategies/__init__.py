"""Search strategies: functions that search from a root node."""
