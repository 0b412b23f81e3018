"""Numbers over scored samples: estimates, votes, tables, power."""
