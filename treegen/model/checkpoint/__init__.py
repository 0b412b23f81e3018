"""Checkpoints on disk: files, tokenizers, model families, quantized weights."""
