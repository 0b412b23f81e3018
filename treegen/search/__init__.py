"""Tree search: nodes to sample from, strategies over them, and records of the results.

A search is an async function of the root node of one problem. Run many with `LLM.search`, step by
step with `LLM.session`, or against a model of your own with `AskTell`.
"""

# Unlike the names of the treegen package, these are not imported lazily. Some functions have the
# names of their modules, which would hide them. Nothing here imports torch.
from treegen.prompts.expansion import Expand as Expand
from treegen.prompts.replies.types import ToolCall as ToolCall
from treegen.prompts.tool_turns import ToolTurns as ToolTurns
from treegen.search.ask_tell import MODEL_END as MODEL_END
from treegen.search.ask_tell import AskTell as AskTell
from treegen.search.ask_tell import SampleRequest as SampleRequest
from treegen.search.ask_tell import ScoreRequest as ScoreRequest
from treegen.search.backend import Backend as Backend
from treegen.search.budget import Budget as Budget
from treegen.search.budget import BudgetReached as BudgetReached
from treegen.search.budget import SearchUsage as SearchUsage
from treegen.search.budget import StopReason as StopReason
from treegen.search.environments.agent import Agent as Agent
from treegen.search.environments.branch import AgentStep as AgentStep
from treegen.search.environments.branch import step_of as step_of
from treegen.search.environments.memory import MemoryEnvironment as MemoryEnvironment
from treegen.search.environments.protocol import Environment as Environment
from treegen.search.environments.protocol import Observation as Observation
from treegen.search.environments.protocol import Traits as Traits
from treegen.search.environments.protocol import World as World
from treegen.search.environments.replay import ReplayEnvironment as ReplayEnvironment
from treegen.search.evaluate import Evaluate as Evaluate
from treegen.search.evaluate import along_path as along_path
from treegen.search.evaluate import by_function as by_function
from treegen.search.evaluate import choice_scores as choice_scores
from treegen.search.evaluate import mean_logprob as mean_logprob
from treegen.search.evaluate import min_logprob as min_logprob
from treegen.search.evaluate import read_choice as read_choice
from treegen.search.evaluate import rollouts as rollouts
from treegen.search.evaluate import sum_logprob as sum_logprob
from treegen.search.evaluate import value_prompt as value_prompt
from treegen.search.evaluate import vote_prompt as vote_prompt
from treegen.search.event_loop import gather as gather
from treegen.search.external_calls import BatchedFunction as BatchedFunction
from treegen.search.multi_model import search_with as search_with
from treegen.search.propose import Propose as Propose
from treegen.search.propose import Step as Step
from treegen.search.propose import combine_proposers as combine_proposers
from treegen.search.propose import lines as lines
from treegen.search.propose import propose_lines as propose_lines
from treegen.search.propose import sample_step as sample_step
from treegen.search.propose import sample_steps as sample_steps
from treegen.search.reward import by_verifier as by_verifier
from treegen.search.reward import load_verifier as load_verifier
from treegen.search.reward import reward_model as reward_model
from treegen.search.strategies.ab_mcts import ab_mcts as ab_mcts
from treegen.search.strategies.beam import beam as beam
from treegen.search.strategies.beam import dvts as dvts
from treegen.search.strategies.best_of_n import best_of_n as best_of_n
from treegen.search.strategies.common import Done as Done
from treegen.search.strategies.common import State as State
from treegen.search.strategies.expand import expand as expand
from treegen.search.strategies.lats import lats as lats
from treegen.search.strategies.majority import lead_probability as lead_probability
from treegen.search.strategies.majority import majority as majority
from treegen.search.strategies.majority import vote as vote
from treegen.search.strategies.mcts import mcts as mcts
from treegen.search.strategies.mutual import mutual as mutual
from treegen.search.strategies.node_statistics import MCTSRules as MCTSRules
from treegen.search.strategies.node_statistics import NodeStatistics as NodeStatistics
from treegen.search.strategies.node_statistics import likelihood_priors as likelihood_priors
from treegen.search.strategies.rebase import allocate as allocate
from treegen.search.strategies.rebase import rebase as rebase
from treegen.search.strategies.refine import answer_after as answer_after
from treegen.search.strategies.refine import self_refine as self_refine
from treegen.search.strategies.tree_of_thoughts import best_first as best_first
from treegen.search.strategies.tree_of_thoughts import bfs as bfs
from treegen.search.strategies.tree_of_thoughts import dfs as dfs
from treegen.search.tree.node import Search as Search
from treegen.search.tree.node import SearchNode as SearchNode
from treegen.search.tree.node import is_ended as is_ended
from treegen.search.tree.records import NodeRecord as NodeRecord
from treegen.search.tree.records import SearchTree as SearchTree
from treegen.search.tree.records import draw_tree as draw_tree
from treegen.search.tree.result import SearchOutcome as SearchOutcome
from treegen.search.tree.result import SearchResult as SearchResult
