"""Tree search: nodes to sample from, strategies over them, and records of the results.

A search is an async function of the root node of one problem. Run many with `LLM.search`, step by
step with `LLM.session`, or against a model of your own with `AskTell`.
"""

# Unlike the names of the treegen package, these are not imported lazily. Some functions have the
# names of their modules, which would hide them. Nothing here imports torch.
from treegen.prompts.expansion import Expand
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
from treegen.search.event_loop import gather
from treegen.search.external_calls import BatchedFunction
from treegen.search.multi_model import search_with
from treegen.search.propose import (
    Propose,
    Step,
    combine_proposers,
    lines,
    propose_lines,
    sample_step,
    sample_steps,
)
from treegen.search.reward import by_verifier, load_verifier, reward_model
from treegen.search.strategies.ab_mcts import ab_mcts
from treegen.search.strategies.beam import beam, dvts
from treegen.search.strategies.best_first import best_first
from treegen.search.strategies.best_of_n import best_of_n
from treegen.search.strategies.common import Done, State
from treegen.search.strategies.expand import expand
from treegen.search.strategies.lats import lats
from treegen.search.strategies.majority import lead_probability, majority, vote
from treegen.search.strategies.mcts import mcts
from treegen.search.strategies.mutual import mutual
from treegen.search.strategies.node_statistics import MCTSRules, NodeStatistics, likelihood_priors
from treegen.search.strategies.rebase import allocate, rebase
from treegen.search.strategies.refine import answer_after, self_refine
from treegen.search.strategies.tree_of_thoughts import bfs, dfs
from treegen.search.tree.draw import draw_tree
from treegen.search.tree.node import Search, SearchNode, is_ended
from treegen.search.tree.records import NodeRecord, SearchTree
from treegen.search.tree.result import SearchOutcome, SearchResult

__all__ = [
    "MODEL_END",
    "AskTell",
    "Backend",
    "BatchedFunction",
    "Budget",
    "BudgetReached",
    "Done",
    "Evaluate",
    "Expand",
    "MCTSRules",
    "NodeRecord",
    "NodeStatistics",
    "Propose",
    "SampleRequest",
    "ScoreRequest",
    "Search",
    "SearchNode",
    "SearchOutcome",
    "SearchResult",
    "SearchTree",
    "SearchUsage",
    "State",
    "Step",
    "StopReason",
    "ab_mcts",
    "allocate",
    "along_path",
    "answer_after",
    "beam",
    "best_first",
    "best_of_n",
    "bfs",
    "by_function",
    "by_verifier",
    "choice_scores",
    "combine_proposers",
    "dfs",
    "draw_tree",
    "dvts",
    "expand",
    "gather",
    "is_ended",
    "lats",
    "lead_probability",
    "likelihood_priors",
    "lines",
    "load_verifier",
    "majority",
    "mcts",
    "mean_logprob",
    "min_logprob",
    "mutual",
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
