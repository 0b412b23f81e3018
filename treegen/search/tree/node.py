"""Nodes of a search: pieces of text with their paths from the root, which a model can continue.

A node is immutable text with a live cache behind it. `sample` draws children, whose keys and values
stay where they were generated. `extend` appends given text. `score` gives log-likelihoods of texts
that could follow. `drop` frees the memory. A Backend computes samples and scores. A Search holds
the tree of one problem.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

from treegen.common.checks import check_int
from treegen.common.outputs import Completion, Score
from treegen.common.params import SamplingParams
from treegen.errors import InputError
from treegen.prompts.images.loading import describe_content
from treegen.prompts.tree import Parts, check_parts
from treegen.search.backend import Backend, Context, MultiModelContext
from treegen.search.budget import Budget, StopReason
from treegen.search.budgeted_search import BudgetedSearch
from treegen.search.event_loop import check_loop, suspend_forever
from treegen.search.external_calls import in_thread
from treegen.search.tree.node_registry import check_same_process, register, resolve_node
from treegen.search.tree.text_node import TextNode

T = TypeVar("T")


class Search(BudgetedSearch):
    """One problem's search: its tree, sampling parameters, budget and usage.

    Attributes:
        restart: How often the search started again at its root. Nodes record it.
    """

    def __init__(
        self,
        backend: Backend,
        content: str | Sequence[int],
        *,
        name: str,
        params: SamplingParams | None = None,
        budget: Budget | None = None,
        context: Context | None = None,
        origin: str | None = None,
    ) -> None:
        """Create a search whose tree has only its prompt.

        Args:
            backend: Computes samples and scores.
            content: The prompt, as text or token ids.
            name: Name of the search.
            params: Default sampling parameters.
            budget: Limits of the search; None is no limit.
            context: Context of the prompt, if it exists already.
            origin: Text that the seeds follow from; by default the name.
        """
        super().__init__(name, budget, origin)
        self.backend = backend
        self.params = params or SamplingParams()
        self.restart = self._num_prompts = 0
        self._other_roots: list[SearchNode] = []
        context = context or backend.prompt(content, self.usage)
        self.root = SearchNode(self, None, f"{name}/", _text(content), context)

    def prompt(self, content: str | Sequence[int], *, key: str | None = None) -> SearchNode:
        """Return the root of a separate tree, such as a prompt that asks for a value.

        It counts towards this search's budget but is not part of its tree. Drop it when you are
        done.

        Args:
            content: The prompt, as text or token ids.
            key: Text that the seeds of its samples follow from, in addition to the search. Prompts
                with equal keys draw the same samples. The default is the number of prompts made
                before, which may differ from run to run if parts of a search run concurrently.
        """
        self._num_prompts += 1
        suffix = f"={key}" if key is not None else str(self._num_prompts)
        context = self.backend.prompt(content, self.usage)
        node = SearchNode(self, None, f"{self.name}/@{suffix}/", _text(content), context)
        self._other_roots = [other for other in self._other_roots if other.is_live]
        self._other_roots.append(node)
        return node

    @contextmanager
    def temporary_prompt(self, text: str, *, key: str | None = None) -> Iterator[SearchNode]:
        """Yield a root that is not in the tree, as `prompt` makes, and drop it at the end.

        Args:
            text: Text of the prompt.
            key: Key of the root, as for `prompt`.
        """
        root = self.prompt(text, key=key)
        try:
            yield root
        finally:
            root.free()

    @cached_property
    def token(self) -> str:
        """A token that identifies the search in pickles of its nodes."""
        return register(self)

    def find(self, key: str) -> SearchNode:
        """Return the node with a key, in the tree or in that of a prompt.

        Raises:
            InputError: There is no such node.
        """
        for root in (self.root, *self._other_roots):
            if not key.startswith(root.key):
                continue
            node: SearchNode | None = root
            for step in key.removeprefix(root.key).split("/")[:-1]:
                below = node.children if node is not None else ()
                node = next((child for child in below if child.key.split("/")[-2] == step), None)
            if node is not None and node.key == key:
                return node
        raise InputError(f"search {self.name!r} has no node {key!r}; take the key from node.key")

    def close(self) -> None:
        """End the search for good and free its caches; its tree can still be read."""
        self.stop("the search is over", StopReason.CLOSED)
        for root in (self.root, *self._other_roots):
            root.free()

    def nodes(self) -> list[SearchNode]:
        """Return all nodes of the tree, parents before children, siblings by their paths."""
        return list(self.root.walk())

    def stop(self, reason: str, by: StopReason = StopReason.STOPPED) -> None:
        """End the search and cancel its calls. Further calls raise BudgetReached.

        Args:
            reason: A sentence for people.
            by: The reason for programs.
        """
        super().stop(reason, by)
        self.backend.cancel(self)


class Releasable(Protocol):
    """Something that holds memory or other resources."""

    def release(self) -> None:
        """Release them; a second call does nothing."""
        ...


class SearchNode(TextNode):
    """A piece of text in a search tree, which a model can continue.

    Attributes:
        search: The search that it belongs to.
        branch: What an agent keeps for it, which is released with the node's cache; None without
            an agent.
    """

    __slots__ = ("_context", "_num_drawn", "_num_extended", "branch", "search")

    def __init__(
        self,
        search: Search,
        parent: SearchNode | None,
        key: str,
        text: str,
        context: Context,
        completion: Completion | None = None,
        order: tuple[int, int] = (0, 0),
    ) -> None:
        """Create a node; `Search.prompt`, `sample` and `extend` do this.

        Args:
            search: The search that it belongs to.
            parent: The node above it; None for a root.
            key: Its key; seeds follow from it.
            text: Its own text.
            context: The backend's handle to the text up to and including the node.
            completion: The sample that it is; None for given text.
            order: Its place among its siblings.
        """
        restart: int = search.restart if parent is not None else 0
        super().__init__(parent, key, text, completion, order, restart)
        self.search = search
        self.branch: Releasable | None = None
        self._context: Context | None = context
        self._num_drawn = self._num_extended = 0

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        check_same_process(self.key)
        return resolve_node, (self.search.token, self.key)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 40 else f"{self.text[:37]}..."
        return f"SearchNode({self.key!r}, {text!r}, value={self.value})"

    @property
    def is_live(self) -> bool:
        """Whether the node can be sampled from, that is, was not dropped."""
        return self._context is not None

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens from the start of the prompt to the end of this node."""
        return self._live().num_tokens

    # Calls of the model

    async def sample(self, n: int = 1, **overrides: Any) -> list[SearchNode]:
        """Draw n children.

        A child's text ends before the stop string unless include_stop is set. Further calls draw
        further children.

        Args:
            n: Children to draw.
            **overrides: Fields of SamplingParams that replace those of the search. `llm` is also
                accepted: the name of the LLM to sample from, if the search has several; see
                `search_with`.

        Raises:
            BudgetReached: The search's budget is used up, or the search is stopped, also during the
                call. Children that had ended by then are in the tree.
            InputError: The node was dropped.
            CapacityError: The node's context or the cache has no room for a sample.
        """
        children = await self._sample(n, overrides)
        _insert(self, children)
        if len(children) < n:
            self.search.check()
            self.search.check_room("nodes", "tokens")  # other calls may have taken the room
        return children

    async def stream(self, n: int, **overrides: Any) -> AsyncGenerator[SearchNode]:
        """Draw n children at once and yield them in order, each as soon as it has ended.

        Leaving the loop cancels the children that have not ended. So the first children may decide
        whether to continue: `async with aclosing(node.stream(40)) as children: async for ...`. It
        yields the same children as `sample` returns and raises the same errors. It is one call.

        Args:
            n: Children to draw.
            **overrides: As for `sample`.
        """
        check_int("n", n, minimum=0)
        self._params_of(n, overrides)  # raises for identical children
        first = self._num_drawn
        self._num_drawn += n
        # They start one right after another, so nothing ends the call in between.
        tasks = [
            asyncio.ensure_future(self._sample(1, overrides, first + i, continues=i > 0))
            for i in range(n)
        ]
        num_placed = 0
        try:
            for task in tasks:
                children = await task
                _insert(self, children)
                num_placed += 1
                for child in children:
                    yield child
            if self.search.stopped is not None:
                self.search.check()  # last, so that all children that ended are yielded
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            # Timing decides which of the other children have ended, so the tree never has them.
            for children in (result for result in results[num_placed:] if isinstance(result, list)):
                for child in children:
                    child.free()
                    self.search.usage.nodes -= 1

    async def _sample(
        self,
        n: int,
        overrides: Mapping[str, Any],
        first: int | None = None,
        *,
        continues: bool = False,
    ) -> list[SearchNode]:
        """Draw children, which are not in `children` yet; fewer if the search is stopped.

        Args:
            n: Children to draw.
            overrides: As for `sample`.
            first: Index of the first child. Default: the next one.
            continues: Whether the children belong to the same call as those drawn before.
        """
        check_int("n", n, minimum=0)
        await self._end_abandoned()
        context = self._context_of(overrides.get("llm"))
        params = self._params_of(n, overrides)
        if n == 0:
            return []
        check_loop(self.search.backend)
        with self.search.drawing(n, continues=continues) as granted:
            if first is None:
                first = self._num_drawn
                self._num_drawn += granted
            if not continues:
                self.search.usage.calls += 1
                self.search.usage.tokens_reprompted += context.num_tokens
            samples = await self.search.backend.sample(
                context,
                self.key,
                range(first, first + granted),
                params,
                self.search,
                continues=continues,
            )
        children = [
            SearchNode(
                self.search,
                self,
                f"{self.key}{first + offset}/",
                sample.completion.text,
                sample.context,
                sample.completion,
                (0, first + offset),
            )
            for offset, sample in enumerate(samples)
            if sample is not None
        ]
        self.search.usage.nodes += len(children)
        if not self.is_live:  # The node was dropped meanwhile, so drop its children too.
            for child in children:
                child.free()
                child.dropped = self.dropped
        return children

    def _params_of(self, n: int, overrides: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of n children; raise InputError for equal children."""
        fields = {name: value for name, value in overrides.items() if name != "llm"}
        params = replace(self.search.params, **fields) if fields else self.search.params
        if params.temperature == 0 and n > 1:
            raise InputError("temperature 0 produces n identical children; use n=1")
        return params

    def extend(self, content: str | Parts) -> SearchNode:
        """Append given text, such as a tool's result or a question; it is computed when needed.

        Args:
            content: Text, or parts as in messages, with images. The chat template's own text around
                an image is added; role markers are not.

        Raises:
            BudgetReached: The budget has no room for another node.
            TreeError: A part is malformed.
            InputError: An image cannot be used, or this node was dropped.
        """
        if not isinstance(content, str):
            check_parts("content", content)
        self.search.check_room("nodes")
        context = self.search.backend.extend(self._live(), content)
        child = SearchNode(
            self.search,
            self,
            f"{self.key}+{self._num_extended}/",
            describe_content(content),
            context,
            order=(1, self._num_extended),
        )
        self._num_extended += 1
        self.search.usage.nodes += 1
        _insert(self, [child])
        return child

    async def score(self, texts: Sequence[str], *, llm: str | None = None) -> list[Score]:
        """Return the log-likelihood of each text after this node.

        Args:
            texts: Texts to score.
            llm: As for `sample`.

        Raises:
            BudgetReached: As for `sample`.
            InputError: A text has no tokens, or this node was dropped.
            CapacityError: A text is too long.
        """
        if isinstance(texts, str):
            raise InputError("texts must be a list; pass a single text as [text]")
        if not texts:
            return []
        await self._end_abandoned()
        context = self._context_of(llm)
        check_loop(self.search.backend)
        self.search.check()
        self.search.usage.calls += 1
        self.search.usage.tokens_reprompted += context.num_tokens
        with self.search.count_pending_call():
            scores = await self.search.backend.score(context, texts, self.search)
        if len(scores) < len(texts):
            self.search.check()
        self.search.usage.tokens_reprompted += sum(len(score.tokens) for score in scores)
        return scores

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function, such as a tool, in a thread while other searches run; return its result.

        This search resumes once none of its samples, scores or other functions is pending. So its
        tree does not depend on how long the function takes.

        Args:
            function: The function to call.
            *args: Its arguments.
        """
        return await in_thread(self, function, *args)

    def drop(self) -> None:
        """Free the pages of this node and of all nodes below it; their text stays in the tree.

        Displays of the tree show these nodes as dropped.

        A prompt may stay in memory while there is room, for other prompts with the same beginning.
        """
        for node in self._list_below():
            node._free_own()
            node.dropped = True

    def free(self) -> None:
        """Free the pages as `drop` does, without a mark in the tree that the node was dropped."""
        for node in self._list_below():
            node._free_own()

    def _list_below(self) -> list[SearchNode]:
        """Return this node and all nodes below it, children before parents."""
        return list(self.walk())[::-1] if self.children else [self]

    def _free_own(self) -> None:
        if self.branch is not None:
            self.branch.release()
        if self._context is not None:
            self.search.backend.release(self._context)
            self._context = None

    def _context_of(self, llm: str | None) -> Context:
        """Return the context of the LLM named `llm`; None means the search's only or first LLM."""
        context = self._live()
        if llm is None:
            return context
        if not isinstance(context, MultiModelContext):
            raise InputError(f"llm={llm!r} is not supported with a single LLM; remove llm")
        return context.on(llm)

    async def _end_abandoned(self) -> None:
        if self.search.is_abandoned:  # the search catches every error, so suspend it instead
            await suspend_forever()

    def _live(self) -> Context:
        if self._context is None:
            raise InputError(f"node {self.key!r} was dropped; use a node that was not dropped")
        return self._context


def _insert(parent: SearchNode, children: list[SearchNode]) -> None:
    parent.children += children
    # Concurrent calls may end in any order, but the tree must not depend on that order.
    parent.children.sort(key=lambda child: child.order)


def _text(content: str | Sequence[int]) -> str:
    return content if isinstance(content, str) else ""


SearchFn = Callable[[SearchNode], Awaitable[object]]
"""Searches one problem. It gets the root of the tree; see `LLM.search` for what it returns."""


def is_ended(node: SearchNode) -> bool:
    """Return whether the model ended the text at this node, by a token and not by a stop string.

    Your own stop tokens count as well. If they separate steps, write your own `done`.
    """
    return node.finish_reason == "stop" and isinstance(node.stop, int)
