"""What a model is asked by a task that makes tokens of its prompts itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.evals.multiple_choice import ChoicePrompt
from treegen.prompts.tree import Node


@dataclass(frozen=True, slots=True, eq=False)
class OwnRequests:
    """The requests of a task, in the order of its problems.

    tree: a sampled node of token ids for each problem, whose id is the problem's.
    params: how the samples of each are drawn; empty if nothing is drawn.
    scored: the texts of each that are scored; empty if samples are drawn.
    text: gives the text of a finished sample, as the task reads it.
    """

    tree: Node
    params: Sequence[SamplingParams] = ()
    scored: tuple[ChoicePrompt, ...] = ()
    text: Callable[[Completion], str] = lambda completion: completion.text
