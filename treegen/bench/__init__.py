"""What `treegen bench` measures: attention, decoding, the engine, searches and published jobs."""
