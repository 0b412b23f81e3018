"""Drawing tokens from logits, by numbers that depend on the sample alone."""
