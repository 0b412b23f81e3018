"""Programs for short tasks, run on tests (HumanEval, MBPP, EvalPlus, LiveCodeBench)."""
