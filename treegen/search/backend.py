"""What computes the samples and scores of a search: a model here, or whatever answers requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.prompts.tree import Parts
from treegen.search.budget import SearchUsage
from treegen.search.budgeted_search import BudgetedSearch


class Context(Protocol):
    """A backend's handle to the text up to and including a node."""

    @property
    def num_tokens(self) -> int:
        """Tokens from the start of the prompt."""
        ...


@runtime_checkable
class MultiModelContext(Context, Protocol):
    """The text up to a node that several LLMs can sample from."""

    def on(self, llm: str) -> Context:
        """The context for one of them; raises InputError for a name that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class BackendSample:
    """One sample, and the context that ends with it."""

    completion: Completion
    context: Context


class Backend(Protocol):
    """What computes the samples and scores of nodes."""

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> Context:
        """The context of a prompt."""
        ...

    def extend(self, context: Context, content: str | Parts) -> Context:
        """The context with text, or with texts and images, appended."""
        ...

    async def sample(
        self,
        context: Context,
        key: str,
        indices: range,
        params: SamplingParams,
        search: BudgetedSearch,
    ) -> Sequence[BackendSample | None]:
        """One sample per index, in that order.

        A sample is a function of (search.origin_of(key), index, params).
        It is None if the search was stopped before the sample had ended.
        """
        ...

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        """Log-likelihood of each text after a context."""
        ...

    def release(self, context: Context) -> None:
        """Forget a context; what other contexts share with it stays."""
        ...

    def cancel(self, search: BudgetedSearch) -> None:
        """End all that a search waits for: its awaits return what they have."""
        ...
