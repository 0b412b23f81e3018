"""Load stock transformers models and make them read batches of tree levels."""
