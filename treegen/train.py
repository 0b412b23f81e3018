"""Log-probabilities and gradients of whole trees."""

from treegen.model.training.tree_logprobs import tree_logprobs as tree_logprobs
from treegen.prompts.rollout_tree import RolloutTree as RolloutTree
from treegen.prompts.rollout_tree import Segment as Segment
from treegen.prompts.rollout_tree import tree_of as tree_of
