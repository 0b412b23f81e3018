"""The names by which a search is asked for. Nothing else here, so that help answers at once."""

from typing import Final

METHODS: Final = {
    "sample": "whole solutions one after another, the plain baseline",
    "best-of-n": "n whole solutions, the best by the evaluation",
    "majority": "whole solutions until their answers agree, the most frequent answer",
    "beam": "the best states of each depth, over all states that led there",
    "dvts": "beams of their own below each of the first steps",
    "rebase": "more next steps for the better states of each depth",
    "tot-bfs": "tree of thought, breadth first",
    "tot-dfs": "tree of thought, depth first with pruning and backtracking",
    "best-first": "always the best state that is not looked into yet",
    "mcts": "Monte Carlo tree search with rollouts",
}
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
