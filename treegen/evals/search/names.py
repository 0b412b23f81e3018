"""The names by which ways to choose, to propose and to judge are asked for."""

from typing import Final

# Which of the solutions that a method found is its answer.
CHOOSE: Final = {
    "best": "the one that the evaluation finds best",
    "vote": "the answer of most weight, each solution weighing what the evaluation makes of it",
}
# Ways that every task has, beside its own.
PROPOSE: Final = ("sample",)
EVALUATE: Final = ("logprob", "min-logprob")
# reward:DIR is a reward model.
REWARD: Final = "reward:"
