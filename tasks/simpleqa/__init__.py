"""SimpleQA: short factual questions, graded by a model."""
