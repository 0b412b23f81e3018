"""Tree search: nodes to sample from, strategies over them, and records of what came out.

A search is an async function of the root node of one problem. Run many with `LLM.search`, step by
step with `LLM.session`, or against a model of your own with `AskTell`.
"""

# Not imported lazily, as names of the treegen package are: some functions have the names of their
# modules, and would be hidden by them. Nothing here imports torch.
from treegen.expansion import Expand
from treegen.search.ask_tell import MODEL_END, AskTell, SampleRequest, ScoreRequest
from treegen.search.beam import beam
from treegen.search.best_first import best_first
from treegen.search.best_of_n import best_of_n
from treegen.search.budget import Budget, BudgetReached, SearchUsage
from treegen.search.dvts import dvts
from treegen.search.evaluate import (
    Evaluate,
    along_path,
    by_function,
    choice_scores,
    mean_logprob,
    min_logprob,
    read_choice,
    rollouts,
    sum_logprob,
    value_prompt,
    vote_prompt,
)
from treegen.search.expand import expand
from treegen.search.gathering import gather
from treegen.search.majority import agreement, majority, vote
from treegen.search.mcts import Arm, mcts
from treegen.search.node import Backend, Search, SearchNode
from treegen.search.propose import (
    Propose,
    Step,
    either,
    ended,
    lines,
    propose_lines,
    sample_step,
    sample_steps,
)
from treegen.search.rebase import allocate, rebase
from treegen.search.result import Found, SearchResult
from treegen.search.reward import reward_model
from treegen.search.strategy import Done, State
from treegen.search.terminal import draw_tree
from treegen.search.thoughts import bfs, dfs
from treegen.search.tree import NodeRecord, SearchTree

__all__ = [
    "MODEL_END",
    "Arm",
    "AskTell",
    "Backend",
    "Budget",
    "BudgetReached",
    "Done",
    "Evaluate",
    "Expand",
    "Found",
    "NodeRecord",
    "Propose",
    "SampleRequest",
    "ScoreRequest",
    "Search",
    "SearchNode",
    "SearchResult",
    "SearchTree",
    "SearchUsage",
    "State",
    "Step",
    "agreement",
    "allocate",
    "along_path",
    "beam",
    "best_first",
    "best_of_n",
    "bfs",
    "by_function",
    "choice_scores",
    "dfs",
    "draw_tree",
    "dvts",
    "either",
    "ended",
    "expand",
    "gather",
    "lines",
    "majority",
    "mcts",
    "mean_logprob",
    "min_logprob",
    "propose_lines",
    "read_choice",
    "rebase",
    "reward_model",
    "rollouts",
    "sample_step",
    "sample_steps",
    "sum_logprob",
    "value_prompt",
    "vote",
    "vote_prompt",
]
