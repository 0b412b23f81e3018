"""Optional features of a run: recurrent states, images, grammars, thinking budgets and others."""
