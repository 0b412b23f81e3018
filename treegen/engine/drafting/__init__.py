"""Drafters: they propose tokens that rows may draw next, which one pass verifies together."""
