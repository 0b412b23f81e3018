"""The tree of a search: nodes, their keys, records of nodes, and drawings of trees."""
