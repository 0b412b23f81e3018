"""A stock transformers model that decodes many branches of shared prompts in one pass."""
