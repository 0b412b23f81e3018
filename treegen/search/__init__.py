"""Tree search: nodes to sample from, strategies over them, and records of the results.

A search is an async function of the root node of one problem. Run many with `LLM.search`, step by
step with `LLM.session`, or against a model of your own with `AskTell`.
"""

# Unlike the names of the treegen package, these are not imported lazily. Some functions have the
# names of their modules, which would hide them. Nothing here imports torch.
from treegen.prompts.expansion import Expand
from treegen.search.aside import Together
from treegen.search.ask_tell import MODEL_END, AskTell, SampleRequest, ScoreRequest
from treegen.search.backend import Backend
from treegen.search.budget import Budget, BudgetReached, SearchUsage, StopReason
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
from treegen.search.loop import gather
from treegen.search.propose import (
    Propose,
    Step,
    either,
    lines,
    propose_lines,
    sample_step,
    sample_steps,
)
from treegen.search.reward import by_verifier, reward_model
from treegen.search.several import search_with
from treegen.search.strategies.ab_mcts import ab_mcts
from treegen.search.strategies.arms import Arm, Rules, likelihood
from treegen.search.strategies.beam import beam
from treegen.search.strategies.best_first import best_first
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.common import Done, State
from treegen.search.strategies.dvts import dvts
from treegen.search.strategies.expand import expand
from treegen.search.strategies.lats import lats
from treegen.search.strategies.majority import agreement, majority, vote
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.mutual import mutual
from treegen.search.strategies.rebase import allocate, rebase
from treegen.search.strategies.refine import prompted, self_refine
from treegen.search.strategies.thoughts import bfs, dfs
from treegen.search.tree.draw import draw_tree
from treegen.search.tree.node import Search, SearchNode, ended
from treegen.search.tree.records import NodeRecord, SearchTree
from treegen.search.tree.result import Found, SearchResult
from treegen.search.verifier import load_verifier

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
    "Rules",
    "SampleRequest",
    "ScoreRequest",
    "Search",
    "SearchNode",
    "SearchResult",
    "SearchTree",
    "SearchUsage",
    "State",
    "Step",
    "StopReason",
    "Together",
    "ab_mcts",
    "agreement",
    "allocate",
    "along_path",
    "beam",
    "best_first",
    "best_of_n",
    "bfs",
    "by_function",
    "by_verifier",
    "choice_scores",
    "dfs",
    "draw_tree",
    "dvts",
    "either",
    "ended",
    "expand",
    "gather",
    "lats",
    "likelihood",
    "lines",
    "load_verifier",
    "majority",
    "mcts",
    "mean_logprob",
    "min_logprob",
    "mutual",
    "prompted",
    "propose_lines",
    "read_choice",
    "rebase",
    "reward_model",
    "rollouts",
    "sample_step",
    "sample_steps",
    "search_with",
    "self_refine",
    "sum_logprob",
    "value_prompt",
    "vote",
    "vote_prompt",
]
