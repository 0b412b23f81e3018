"""Instructions that a program can check (IFEval)."""
