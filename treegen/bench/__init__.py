"""What `treegen bench` measures; each module has one function that yields rows of a table."""
