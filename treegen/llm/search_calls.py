"""The search calls of models that compute here, and the levels that prompt trees declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from treegen.common.params import Params, check_tree_params
from treegen.common.spec import ModelSpec
from treegen.prompts.plan.requests import expand_requests
from treegen.prompts.tree import Node, expansions_of
from treegen.search.budget import Budget
from treegen.search.run import SearchRun
from treegen.search.search_calls import SearchCalls
from treegen.search.session import flat_content
from treegen.search.strategies.expand import expand
from treegen.search.tree.node import SearchNode
from treegen.search.tree.result import SearchOutcome, SearchProblem, SearchResult

if TYPE_CHECKING:
    from treegen.prompts.images.table import ImageTable


class LocalSearchCalls(SearchCalls[SearchRun]):
    """The search calls of an LLM or of a cluster's workers."""

    tokenizer: Any
    spec: ModelSpec
    images: ImageTable | None = None

    def _read_prompt(self, content: Any, template: Mapping[str, Any]) -> str | Sequence[int]:
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
            return await expand(root, expansions[root.search.name].levels)

        problems = [
            SearchProblem(
                request.id,
                expansions[request.id].text or request.tokens.tolist(),
                is_named=expansions[request.id].path[-1].id is not None,
            )
            for request in requests
        ]
        return self.search(run, problems, params, concurrency=concurrency, budget=budget, rows=rows)
