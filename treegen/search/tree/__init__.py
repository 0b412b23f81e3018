"""The tree of a search: nodes, what they are called, records of them, and how they are drawn."""
