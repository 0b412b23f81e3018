"""Prompt trees to token ids and back: joint tokenization, plans, stop conditions, replies.

Nothing here needs torch.
"""
