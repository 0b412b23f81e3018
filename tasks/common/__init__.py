"""Code that several tasks share: rows of data files, answers in texts, few-shot examples."""
