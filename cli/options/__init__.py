"""What a user has typed: options that commands share, pairs of names and values, workers."""
