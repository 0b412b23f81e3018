"""A session: search trees whose caches live in a model, all sampled in the same steps.

There are two ways to use it. `sample` and `score` compute many nodes at once and wait. `start` and
`step` are for a loop of your own. For searches written as coroutines see `LLM.search`.
"""

from __future__ import annotations

from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar, cast
from weakref import WeakSet

from treegen.common.lifetimes import ClosedWhenCollected, NonCopyable
from treegen.common.outputs import Score, Usage
from treegen.common.params import Params, SamplingParams, check_params
from treegen.common.synchronization import ExclusiveSection
from treegen.errors import InputError
from treegen.prompts.images.table import ImageTable
from treegen.prompts.tokens import tokenize
from treegen.prompts.tree import Message, Node, chat_arguments
from treegen.search.backend import PendingResults
from treegen.search.budget import Budget, BudgetIgnored, SearchUsage, check_budget
from treegen.search.event_loop import add_session, drive_backend, keep_suspended
from treegen.search.live.backend import LiveBackend
from treegen.search.tree.node import Search, SearchNode

T = TypeVar("T")

_MIN_SWEEP_SIZE: Final = 64


@dataclass(slots=True, eq=False)
class Started(Generic[T]):
    """A call that `Session.start` started. It is done when `Session.step` has returned it."""

    call: Coroutine[Any, Any, T]
    """The coroutine."""
    tickets: list[PendingResults[Any]] = field(default_factory=list)
    """The results that it waits for."""
    is_done: bool = False
    """Whether it has ended."""
    error: BaseException | None = None
    """What it raised; None if nothing."""
    _result: T | None = None

    @property
    def result(self) -> T:
        """The return value of the call; raises the call's error, and InputError if not done."""
        if self.error is not None:
            raise self.error
        if not self.is_done:
            raise InputError(
                "the result is not available yet; call step() until the returned list contains "
                "this call"
            )
        return cast(T, self._result)

    def advance(self) -> None:
        """Run the call until it waits again or ends."""
        try:
            self.call.send(None)
        except StopIteration as stop:
            self._result, self.is_done = stop.value, True
        except (Exception, BudgetIgnored) as error:  # `result` raises it
            self.error, self.is_done = error, True

    def fail(self, error: Exception) -> None:
        """End the call with an error."""
        try:
            self.call.close()
        except RuntimeError:  # the coroutine ignores GeneratorExit
            keep_suspended(self.call)
        self.error, self.is_done = error, True


class Session(ClosedWhenCollected, NonCopyable):
    """Search trees over one model; made by `LLM.session`, ended by `close` or a `with` block.

    Only one thread at a time may use it; otherwise InputError is raised.
    """

    def __init__(self, backend: LiveBackend, params: SamplingParams) -> None:
        """Create a session without trees.

        Args:
            backend: Computes samples and scores.
            params: Default sampling parameters of its searches.
        """
        self.backend, self.params = backend, params
        add_session(backend)
        self._started: list[Started[Any]] = []
        self._num_roots = 0
        self._searches: WeakSet[Search] = WeakSet()
        self._live: list[Search] = []  # keeps searches alive whose nodes nobody holds
        self._sweep_size = _MIN_SWEEP_SIZE
        self._exclusive = ExclusiveSection("session")

    def root(
        self,
        content: str | Sequence[int] | Sequence[Message],
        *,
        name: str | None = None,
        params: Params | None = None,
        budget: Budget | None = None,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> SearchNode:
        """Return the root of a new search; prompt prefixes shared with other roots are stored once.

        Args:
            content: The prompt: text, token ids or chat messages.
            name: The seeds of its samples follow from the name. Without a name they follow from the
                prompt and the number of earlier unnamed roots of that prompt. These are counted
                since the LLM was created, or in this session if params have a seed.
            params: Sampling parameters; by default those of the session.
            budget: Budget of this search.
            tools: Tools for the chat template.
            chat_template_kwargs: Further variables of the chat template.

        Raises:
            InputError: The prompt, the params or the budget cannot be used.
        """
        check_budget(budget)
        template = chat_arguments(tools, chat_template_kwargs)
        flat = flat_content(content, self.backend.tokenizer, template, self.backend.images)
        params = self.params if params is None else check_params(params)
        if params.n != 1:
            raise InputError(
                f"n={params.n} is supported only in LLM.generate; in a search, use node.sample(n)"
            )
        context = self.backend.prompt(flat, SearchUsage())
        origin = None
        if name is None:
            name, origin = str(self._num_roots), self.backend.new_origin(context, params.seed)
        self._num_roots += 1
        search = Search(
            self.backend,
            flat,
            name=name,
            params=params,
            budget=budget,
            context=context,
            origin=origin,
        )
        self._searches.add(search)
        self._live.append(search)
        if len(self._live) > self._sweep_size:
            self._live = [other for other in self._live if other.root.is_live]
            self._sweep_size = max(_MIN_SWEEP_SIZE, 2 * len(self._live))
        return search.root

    def find(self, key: str) -> SearchNode:
        """Return the node with a key (`SearchNode.key`), such as a key that a controller stored.

        Raises:
            InputError: No node that is in use has the key; or several have, because their roots
                share a name.
        """
        matches = []
        for search in list(self._searches):
            with suppress(InputError):
                matches.append(search.find(key))
        if len(matches) != 1:
            which = f"{len(matches)} nodes" if matches else "no node"
            hint = (
                "use a different name for each search" if matches else "take the key from node.key"
            )
            raise InputError(f"the session has {which} with the key {key!r}; {hint}")
        return matches[0]

    def sample(
        self, counts: Mapping[SearchNode, int], **overrides: Any
    ) -> dict[SearchNode, list[SearchNode]]:
        """Draw children of several nodes at once; see `SearchNode.sample`.

        Args:
            counts: Node -> number of children.
            **overrides: Sampling parameters, as for `SearchNode.sample`.
        """
        self._check_own("counts", counts)
        with self._exclusive():
            calls = [node.sample(n, **overrides) for node, n in counts.items()]
            return dict(zip(counts, self._wait(calls), strict=True))

    def score(self, texts: Mapping[SearchNode, Sequence[str]]) -> dict[SearchNode, list[Score]]:
        """Return the log-likelihoods of texts after several nodes; see `SearchNode.score`."""
        self._check_own("texts", texts)
        with self._exclusive():
            calls = [node.score(of_node) for node, of_node in texts.items()]
            return dict(zip(texts, self._wait(calls), strict=True))

    def _check_own(self, name: str, nodes: Mapping[SearchNode, object]) -> None:
        if not isinstance(nodes, Mapping):
            raise InputError(
                f"{name} must be a mapping of nodes, such as {{node: 4}} or {{node: [' yes']}}, "
                f"got {nodes!r:.80}"
            )
        for node in nodes:
            if not isinstance(node, SearchNode):
                raise InputError(f"expected nodes of the session, got {node!r:.80}")
            if node.search.backend is not self.backend:
                raise InputError(f"node {node.key!r} belongs to another session; use that session")

    def _wait(self, calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        started = [self.start(call) for call in calls]
        while any(not ongoing.is_done for ongoing in started):
            self._work()
        self._started = [ongoing for ongoing in self._started if ongoing not in started]
        return [ongoing.result for ongoing in started]

    def start(self, call: Coroutine[Any, Any, T]) -> Started[T]:
        """Start a call, such as `node.sample(5)`; `step` returns it when it is done.

        Raises:
            InputError: The call is not a coroutine.
        """
        if not isinstance(call, Coroutine):
            raise InputError(f"call must be a call such as node.sample(5), got {call!r:.80}")
        with self._exclusive():
            started = Started(call)
            self._started.append(started)
            self._advance(started)
        return started

    def step(self) -> list[Started[Any]]:
        """Run one forward pass if there is work; return the calls that are done, each once."""
        self._work()
        return self._take_done()

    def _work(self) -> None:
        with self._exclusive():
            if self.backend.has_work:
                self.backend.step()
            while True:
                self._advance_ready()
                if not sum(search.return_next() for search in list(self._searches)):
                    break

    def _advance_ready(self) -> None:
        """Continue the calls whose results have arrived."""
        for started in self._started:
            if not started.is_done and all(ticket.is_done for ticket in started.tickets):
                self._advance(started)

    def resume(self) -> list[Started[Any]]:
        """Continue calls without a forward pass; return those that are done, each once.

        It is for a run whose steps another object computes.
        """
        with self._exclusive():
            self._advance_ready()
            return self._take_done()

    def _take_done(self) -> list[Started[Any]]:
        done = [started for started in self._started if started.is_done]
        self._started = [started for started in self._started if not started.is_done]
        return done

    def _advance(self, started: Started[Any]) -> None:
        self.backend.new.clear()
        with drive_backend(self.backend):
            started.advance()
        started.tickets = self.backend.new.copy()
        if not started.is_done and not started.tickets:
            started.fail(
                InputError(
                    "the started call is waiting for something other than this session; start only "
                    "calls on nodes of this session, such as node.sample(5)"
                )
            )

    @property
    def usage(self) -> Usage:
        """Usage of the session so far, over all searches."""
        return self.backend.usage

    @property
    def closed(self) -> bool:
        """Whether the session is closed."""
        return self.backend.closed

    def close(self) -> None:
        """End all searches and free their pages; their trees can still be read."""
        self.backend.close()


def flat_content(
    content: str | Sequence[int] | Sequence[Message],
    tokenizer: Any,
    template: Mapping[str, Any] | None = None,
    images: ImageTable | None = None,
) -> str | Sequence[int]:
    """Return text and token ids unchanged, and chat messages as token ids.

    Args:
        content: Text, token ids or chat messages.
        tokenizer: Renders and tokenizes messages.
        template: Arguments of the chat template; see `Node`.
        images: The model's images; None if it takes none.
    """
    node = Node(content, template=template or {})
    if node.has_messages or node.template:
        ids: list[int] = tokenize(node, tokenizer, images)[0].tokens.tolist()
        return ids
    return cast(str | Sequence[int], content)
