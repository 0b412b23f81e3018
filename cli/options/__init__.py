"""Parsing of the command line: options that commands share, name=value pairs, workers."""
