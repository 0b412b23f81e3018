"""Names of the ways to choose an answer, to propose steps and to evaluate states."""

from typing import Final

# Ways to choose the answer from the solutions that a method has found.
CHOOSE: Final = {
    "best": "the one that the evaluation finds best",
    "vote": "the answer of most weight, each solution weighing what the evaluation makes of it",
}
# Ways that all tasks share; a task may have further ways.
PROPOSE: Final = ("sample",)
EVALUATE: Final = ("logprob", "min-logprob")
# reward:DIR evaluates states with the reward model in a directory.
REWARD: Final = "reward:"
