"""Checkpoints on disk: files, tokenizers, model families, quantised weights."""
