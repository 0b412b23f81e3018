"""The calls that run a search function over many problems, wherever the model computes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from treegen.common.checks import check_int
from treegen.common.params import Params, SamplingParams, check_tree_params
from treegen.common.spec import ModelSpec
from treegen.errors import InputError
from treegen.prompts.plan.requests import expand_requests
from treegen.prompts.tree import Node, chat_arguments, expansions_of
from treegen.search.budget import Budget, check_budget
from treegen.search.run import SearchResults, SearchRun
from treegen.search.strategies.expand import expand
from treegen.search.tree.node import SearchFn, SearchNode
from treegen.search.tree.result import (
    SearchOutcome,
    SearchProblem,
    SearchResult,
    name_problems,
)

if TYPE_CHECKING:
    from treegen.prompts.images.table import ImageTable

Run = TypeVar("Run", bound=SearchResults, covariant=True)


class SearchCalls(ABC, Generic[Run]):
    """The search calls of everything that starts searches: an LLM, a cluster or a remote model."""

    @abstractmethod
    def _read_prompt(self, content: Any, template: Mapping[str, Any]) -> Any:
        """Return a prompt in the form that `_start_searches` takes.

        Args:
            content: Text, token ids or chat messages.
            template: Arguments of the chat template.
        """

    @abstractmethod
    def _start_searches(
        self,
        fn: SearchFn,
        problems: Sequence[SearchProblem],
        *,
        params: SamplingParams,
        **options: Any,
    ) -> Run:
        """Start a search of each problem.

        Args:
            fn: The search.
            problems: The problems.
            params: Default sampling parameters of nodes.
            **options: Further arguments of the run: concurrency, budget and rows.
        """

    def search(
        self,
        fn: SearchFn,
        problems: Iterable[Any],
        params: Params | None = None,
        *,
        concurrency: int = 64,
        budget: Budget | None = None,
        rows: int = 8,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[SearchResult]:
        """Run a search of each problem, many at once; return results in the order of the problems.

        The name and the seed determine the draws of a search, whatever else runs. Without a name,
        the prompt's tokens replace it. Then, as with `generate`, another search of the same prompt
        draws other samples, unless params have a seed.

        If a search fails, its result has the error and the tree so far. If all searches fail, a
        warning says so. Raises what `search_stream` and its iterator raise.

        Args:
            fn: `async def fn(root)`, which samples from the nodes of one problem's tree. It may
                return a SearchOutcome, a node or nodes (the best first), or anything else; see
                `treegen.search`.
            problems: Prompts (text, token ids or chat messages), or (name, prompt) pairs.
            params: Default sampling parameters of nodes.
            concurrency: Maximum number of searches at once. Default: 64.
            budget: Budget of each search. Default: no limit.
            rows: Expected number of samples that one search decodes at once. It decides which
                segments of the prompts get an attention level of their own. Default: 8.
            tools: Tools that the chat template lists. Default: none.
            chat_template_kwargs: Further arguments of the chat template. Default: none.
        """
        return self.search_stream(
            fn,
            problems,
            params,
            concurrency=concurrency,
            budget=budget,
            rows=rows,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        ).in_order()

    def search_stream(
        self,
        fn: SearchFn,
        problems: Iterable[Any],
        params: Params | None = None,
        *,
        concurrency: int = 64,
        budget: Budget | None = None,
        rows: int = 8,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Run:
        """Start the searches of `search`; return an iterator over the results as they finish.

        Args:
            fn: As for `search`, like all further arguments.
            problems: Prompts, or (name, prompt) pairs.
            params: Default sampling parameters of nodes.
            concurrency: Maximum number of searches at once.
            budget: Budget of each search.
            rows: Expected number of samples that one search decodes at once.
            tools: Tools that the chat template lists.
            chat_template_kwargs: Further arguments of the chat template.

        Raises:
            InputError: an argument cannot be used, two problems have one name, another run of this
                LLM is not finished, or the server cannot be reached.
            TreegenError: from the iterator, errors of the model itself, such as NumericsError; they
                end all searches.
        """
        if not callable(fn):
            raise InputError(
                f"fn must be a function `async def fn(root)`, got {fn!r:.60}; call a strategy of "
                "treegen.search in the function"
            )
        check_int("concurrency", concurrency, minimum=1)
        check_int("rows", rows, minimum=1)
        check_budget(budget)
        template = chat_arguments(tools, chat_template_kwargs)
        named = name_problems(problems, lambda content: self._read_prompt(content, template))
        return self._start_searches(
            fn,
            named,
            params=check_tree_params(params),
            concurrency=concurrency,
            budget=budget,
            rows=rows,
        )


class LocalSearchCalls(SearchCalls[SearchRun]):
    """The search calls of an LLM or of a cluster's workers, which also grow prompt trees."""

    tokenizer: Any
    spec: ModelSpec
    images: ImageTable | None = None

    def _read_prompt(self, content: Any, template: Mapping[str, Any]) -> str | Sequence[int]:
        from treegen.search.session import flat_content  # imports torch

        return flat_content(content, self.tokenizer, template, self.images)

    def expand(
        self,
        tree: Node,
        params: Params | None = None,
        *,
        concurrency: int = 64,
        budget: Budget | None = None,
        rows: int | None = None,
    ) -> list[SearchResult]:
        """Generate the levels that nodes of a tree declare; return one result per such node.

        Args:
            tree: Root of the prompt tree.
            params: Sampling parameters. Default: those of `SamplingParams()`.
            concurrency: As for `search`.
            budget: As for `search`.
            rows: As for `search`. Default: the rows of the largest level.

        Raises:
            TreeError: the tree is malformed or generates nothing.
            CapacityError: a prompt is too long for the model.
            TreegenError: as for `search`.
        """
        params = check_tree_params(params)
        expansions = {expansion.id: expansion for expansion in expansions_of(tree)}
        requests = expand_requests(tree, self.tokenizer, params, self.spec, self.images)
        rows = max(request.rows for request in requests) if rows is None else rows

        async def run(root: SearchNode) -> SearchOutcome:
            return await expand(root, expansions[root.search.name].node.expand)

        problems = [
            SearchProblem(
                request.id,
                expansions[request.id].text or request.tokens.tolist(),
                is_named=expansions[request.id].node.id is not None,
            )
            for request in requests
        ]
        return self.search(run, problems, params, concurrency=concurrency, budget=budget, rows=rows)
