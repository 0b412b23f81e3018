"""Programs for short tasks, judged by running them (HumanEval, MBPP, EvalPlus, LiveCodeBench)."""
