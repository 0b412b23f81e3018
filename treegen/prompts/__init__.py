"""From what a user declares to token ids, and back: trees, joint tokenization, where a text ends.

Nothing here needs torch."""
