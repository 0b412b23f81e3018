"""What `treegen bench` measures: attention, decode steps, prefill passes, and jobs of a cluster."""
