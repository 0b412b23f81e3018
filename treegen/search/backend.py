"""The backend interface: computes samples and scores with a local model or by external requests."""

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
        """Number of tokens from the start of the prompt."""
        ...


@runtime_checkable
class MultiModelContext(Context, Protocol):
    """The text up to a node that several LLMs can sample from."""

    def on(self, llm: str) -> Context:
        """Return the context for one of the LLMs; raises InputError for an unknown name."""
        ...


@dataclass(frozen=True, slots=True)
class BackendSample:
    """One sample, and the context up to its end."""

    completion: Completion
    context: Context


class Backend(Protocol):
    """Computes the samples and scores of nodes."""

    def prompt(self, content: str | Sequence[int], usage: SearchUsage) -> Context:
        """Return the context of a prompt, and count its tokens in `usage`."""
        ...

    def extend(self, context: Context, content: str | Parts) -> Context:
        """Return the context with text, or with texts and images, appended."""
        ...

    async def sample(
        self,
        context: Context,
        key: str,
        indices: range,
        params: SamplingParams,
        search: BudgetedSearch,
    ) -> Sequence[BackendSample | None]:
        """Draw one sample per index, in that order.

        A sample is a function of (search.origin_of(key), index, params).

        Args:
            context: The text that the samples continue.
            key: Key of the node.
            indices: Index of each sample.
            params: Sampling parameters.
            search: The search that asks.

        Returns:
            The samples; None for each that had not ended when the search was stopped.
        """
        ...

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        """Return the log-likelihood of each text after a context.

        Args:
            context: The text before the texts.
            texts: The texts to score.
            search: The search that asks.
        """
        ...

    def release(self, context: Context) -> None:
        """Release a context; what other contexts share with it stays."""
        ...

    def cancel(self, search: BudgetedSearch) -> None:
        """End all pending calls of a search; its awaits return the results that have arrived."""
        ...
