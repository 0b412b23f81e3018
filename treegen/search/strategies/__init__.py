"""Ways to search: functions of a root node."""
