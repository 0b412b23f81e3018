"""The `treegen` command line."""
