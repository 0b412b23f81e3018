"""The requests of a task that tokenizes its prompts itself."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.evals.multiple_choice import ChoicePrompt
from treegen.prompts.tree import Node


@dataclass(frozen=True, slots=True, eq=False)
class OwnRequests:
    """The requests of a task, in the order of its problems."""

    tree: Node
    """A sampled node of token ids for each problem, with the problem's id."""
    params: Sequence[SamplingParams] = ()
    """Sampling parameters for each problem; empty if nothing is drawn."""
    scored: tuple[ChoicePrompt, ...] = ()
    """The scored texts of each problem; empty if samples are drawn."""
    text: Callable[[Completion], str] = lambda completion: completion.text
    """Returns the text of a finished sample, as the task reads it."""
