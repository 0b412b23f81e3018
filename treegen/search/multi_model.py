"""Searches whose nodes several LLMs sample from, each with its own cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from treegen.common.checks import check_argument_types, check_counts
from treegen.common.outputs import Score, Status, Usage
from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.prompts.tree import Parts
from treegen.search.backend import BackendSample, Context
from treegen.search.budget import Budget, SearchUsage, check_budget
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.tree.node import SearchFn
from treegen.search.tree.result import SearchResult, name_problems

if TYPE_CHECKING:
    from treegen.prompts.images.table import ImageTable
    from treegen.search.live.backend import LiveBackend
    from treegen.search.session import Session

Content = str | Sequence[int]


class SessionFactory(Protocol):
    """The interface of an LLM that `search_with` needs."""

    tokenizer: Any
    images: ImageTable | None

    def session(self, params: SamplingParams | None = None) -> Session:
        """Open a session with search trees of its own."""
        ...


@dataclass(slots=True, eq=False)
class CrossModelContext:
    """The text up to a node, in the caches of those LLMs that needed it."""

    above: CrossModelContext | None
    """The context that it continues; None for a prompt."""
    content: str | Parts | Mapping[str, Content]
    """Its own text; for a prompt, the content for each LLM."""
    backends: Mapping[str, LiveBackend]
    """The backend of each LLM, by the LLM's name."""
    contexts: dict[str, Context] = field(default_factory=dict)
    """The context in each cache, by the LLM's name."""

    def of(self, name: str) -> Context:
        """Return the context in one LLM's cache; its text is computed at the first use."""
        backend, missing, context = self.backends[name], list[CrossModelContext](), self
        # A loop, because a path may be deeper than the interpreter's recursion limit.
        while name not in context.contexts and context.above is not None:
            missing.append(context)
            context = context.above
        if name not in context.contexts:
            assert isinstance(context.content, Mapping)
            context.contexts[name] = backend.prompt(context.content[name], SearchUsage())
        for below in reversed(missing):
            assert not isinstance(below.content, Mapping)
            below.contexts[name] = backend.extend(context.contexts[name], below.content)
            context = below
        return self.contexts[name]

    def on(self, name: str) -> SelectedModelContext:
        """Return the context for one of the LLMs; raises InputError for an unknown name."""
        if name not in self.backends:
            raise InputError(
                f"there is no LLM {name!r}; the available LLMs are {', '.join(self.backends)}"
            )
        return SelectedModelContext(self, name)

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start of the prompt, as one of the LLMs counts them."""
        return self.of(next(iter(self.contexts or self.backends))).num_tokens


@dataclass(frozen=True, slots=True, eq=False)
class SelectedModelContext:
    """A context, and the name of the LLM that is to sample from it."""

    shared: CrossModelContext
    name: str

    @property
    def num_tokens(self) -> int:
        """Number of tokens from the start of the prompt."""
        return self.shared.of(self.name).num_tokens


class MultiModelBackend:
    """The Backend of searches over several LLMs. The first one samples by default."""

    def __init__(
        self, backends: Mapping[str, LiveBackend], contents: Sequence[Mapping[str, Content]]
    ) -> None:
        """Create a backend that combines those of the LLMs.

        Args:
            backends: The backend of each LLM, by the LLM's name.
            contents: For each known prompt, the content for each LLM.
        """
        self._backends, self._contents = dict(backends), contents
        self._first = next(iter(self._backends))

    # Methods of RunBackend

    @property
    def usage(self) -> Usage:
        """Usage of the first LLM so far."""
        return self._backends[self._first].usage

    def status(self) -> Status:
        """Return the load of the first LLM."""
        return self._backends[self._first].status()

    @property
    def closed(self) -> bool:
        """Whether the caches are freed."""
        return any(backend.closed for backend in self._backends.values())

    @property
    def has_work(self) -> bool:
        """Whether a requested result has not been computed."""
        return any(backend.has_work for backend in self._backends.values())

    def step(self) -> None:
        """Run one forward pass of each LLM that has work."""
        try:
            for backend in self._backends.values():
                if backend.has_work:
                    backend.step()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all searches and free their pages."""
        for backend in self._backends.values():
            backend.close()

    def add_prompts(self, contents: Sequence[Content], *, rows: int) -> list[Context]:
        """Return contexts of the known prompts, which each LLM stores once."""
        contexts = {
            name: backend.add_prompts([content[name] for content in self._contents], rows=rows)
            for name, backend in self._backends.items()
        }
        return [
            CrossModelContext(
                None, content, self._backends, {name: contexts[name][index] for name in contexts}
            )
            for index, content in enumerate(self._contents)
        ]

    def new_origin(self, context: Context, seed: int | None) -> str:
        """Return the origin of the seeds of a new unnamed search of a prompt."""
        assert isinstance(context, CrossModelContext)
        return self._backends[self._first].new_origin(context.of(self._first), seed)

    # Methods of Backend

    def prompt(self, content: Content, usage: SearchUsage) -> Context:
        """Return the context of a text prompt; token ids raise InputError."""
        if not isinstance(content, str):
            raise InputError("token ids depend on the LLM; for several LLMs, use text")
        return CrossModelContext(None, dict.fromkeys(self._backends, content), self._backends)

    def extend(self, context: Context, content: str | Parts) -> Context:
        """Return the context with text, or with texts and images, appended."""
        assert isinstance(context, CrossModelContext)
        return CrossModelContext(context, content, self._backends)

    async def sample(
        self,
        context: Context,
        key: str,
        indices: range,
        params: SamplingParams,
        search: BudgetedSearch,
        *,
        continues: bool = False,
    ) -> Sequence[BackendSample | None]:
        """Draw one sample per index, with the LLM of the context or else the first.

        Args:
            context: The text that the samples continue.
            key: Key of the node.
            indices: Index of each sample.
            params: Sampling parameters.
            search: The search that asks.
            continues: Whether the samples belong to a call that is already counted.
        """
        shared, name = self._resolve_model(context)
        samples = await self._backends[name].sample(
            shared.of(name), key, indices, params, search, continues=continues
        )
        return [
            None
            if sample is None
            else BackendSample(
                sample.completion,
                CrossModelContext(
                    shared, sample.completion.text, self._backends, {name: sample.context}
                ),
            )
            for sample in samples
        ]

    async def score(
        self, context: Context, texts: Sequence[str], search: BudgetedSearch
    ) -> list[Score]:
        """Return the log-likelihood of each text, by the LLM of the context or else the first.

        Args:
            context: The text before the texts.
            texts: The texts to score.
            search: The search that asks.
        """
        shared, name = self._resolve_model(context)
        return await self._backends[name].score(shared.of(name), texts, search)

    def release(self, context: Context) -> None:
        """Release a context in every LLM's cache."""
        assert isinstance(context, CrossModelContext)
        for name, own_context in context.contexts.items():
            self._backends[name].release(own_context)

    def cancel(self, search: BudgetedSearch) -> None:
        """End all calls that a search waits for."""
        for backend in self._backends.values():
            backend.cancel(search)

    def _resolve_model(self, context: Context) -> tuple[CrossModelContext, str]:
        if isinstance(context, SelectedModelContext):
            return context.shared, context.name
        assert isinstance(context, CrossModelContext)
        return context, self._first


@check_argument_types
def search_with(
    llms: Mapping[str, SessionFactory],
    fn: SearchFn,
    problems: Iterable[Any],
    params: SamplingParams | None = None,
    *,
    concurrency: int = 64,
    budget: Budget | None = None,
    rows: int = 8,
) -> list[SearchResult]:
    """Run a search of each problem over several LLMs; return results in the order of the problems.

    A budget of tokens counts those of all LLMs. When one LLM reaches it, the tokens that the others
    are generating may exceed it.

    Args:
        llms: LLMs by names of your choice. `node.sample(n, llm=NAME)` and `node.score(texts,
            llm=NAME)` use the LLM of that name, by default the first. What one LLM generated is
            text to the others, which compute it when they first need it.
        fn: The search, as for `LLM.search`.
        problems: Text or chat messages, which each LLM renders by its own template, or (name,
            prompt) pairs.
        params: Default sampling parameters.
        concurrency: Maximum number of searches that run at once.
        budget: Budget of each search.
        rows: Rows that each search is expected to decode at once.

    Raises:
        InputError: Prompts are token ids, or an argument cannot be used. Errors of `LLM.search` are
            raised too.
    """
    from treegen.search.run import SearchRun
    from treegen.search.session import flat_content

    if not llms:
        raise InputError("llms must not be empty; pass at least one LLM by name")
    for name, llm in llms.items():
        if not callable(getattr(llm, "session", None)):
            raise InputError(f"llms[{name!r}] must be an LLM, got {llm!r:.60}")
    check_counts(concurrency=concurrency, rows=rows)
    check_budget(budget)
    listed = name_problems(problems, _check_content)
    with ExitStack() as stack:
        sessions = {name: stack.enter_context(llm.session(params)) for name, llm in llms.items()}
        contents: list[Mapping[str, Content]] = [
            {
                name: flat_content(problem.content, llm.tokenizer, images=llm.images)
                for name, llm in llms.items()
            }
            for problem in listed
        ]
        backend = MultiModelBackend({n: s.backend for n, s in sessions.items()}, contents)
        first = next(iter(llms))
        run = SearchRun(
            backend,
            fn,
            [
                replace(problem, content=by_llm[first])
                for problem, by_llm in zip(listed, contents, strict=True)
            ],
            params=sessions[first].params,
            concurrency=concurrency,
            budget=budget,
            rows=rows,
        )
        return run.in_order()


def _check_content(content: Any) -> Any:
    """Return the content of a problem unchanged; raise InputError for token ids."""
    is_list = isinstance(content, Iterable) and not isinstance(content, str)
    if is_list and all(isinstance(token, int) for token in content):
        raise InputError("token ids depend on the LLM; for several LLMs, use text or messages")
    return content
