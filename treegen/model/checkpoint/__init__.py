"""Checkpoints as they lie on disk: files, tokenizers, families, how weights are quantised."""
