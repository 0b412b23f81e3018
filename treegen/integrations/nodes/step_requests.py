"""The calls that a search makes in one step, as the operations of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from treegen.errors import InputError
from treegen.integrations.nodes import protocol
from treegen.search.backend import PendingResults


@dataclass(slots=True, eq=False)
class NodeContext:
    """A node that the server has, or that it will create with the first call that needs it."""

    parent: NodeContext | None
    """The parent; None for a root."""
    content: Any
    """Given text, parts or a prompt; None for a sample."""
    path: str
    """Its key without the name of the root, such as "0/+0/"."""
    id: str | None = None
    """Its id on the server; None until it is created."""
    num_tokens: int = 0
    """Number of tokens from the start of the prompt, without those of nodes that the server has not
    created yet."""
    num_extended: int = 0
    """Number of extensions below it."""
    creator: StepRequest | None = None
    """The request in progress that creates it."""
    is_released: bool = False
    """Whether the search has dropped it."""

    @property
    def root(self) -> NodeContext:
        """The root of its tree, which may be deeper than the interpreter's recursion limit."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    @property
    def is_pending(self) -> bool:
        """Whether a request in progress creates it or an ancestor."""
        node: NodeContext | None = self
        while node is not None and node.id is None:
            if node.creator is not None:
                return True
            node = node.parent
        return False


@dataclass(slots=True, eq=False)
class StepCall:
    """A call for samples or scores of one node. Several may belong to one ticket."""

    ticket: Ticket
    context: NodeContext
    root_name: str | None
    """Name of the root, if it has to be created; None if nothing is drawn below it."""
    make: Callable[..., protocol.Operation]
    """Returns the operation for the id of its node."""
    result_indices: range
    """Indices of the results in the ticket."""
    max_tokens: int
    """Maximum number of tokens of a sample."""
    num_counted_tokens: int | None
    """Tokens of the context that the usage includes already; None if another call counts them."""
    num_refusals: int = 0
    """How often the server was too busy for it."""


@dataclass(slots=True, eq=False)
class Ticket(PendingResults[Any]):
    """Results that a search waits for, which operations of the server compute."""

    num_open: int = field(init=False)
    """Results still to come; those of samples that have not started count too."""

    def __post_init__(self) -> None:
        self.num_open = len(self.results)


class StepRequest:
    """Operations of one search that are sent together."""

    def __init__(self, max_operations: int, lease_seconds: float | None) -> None:
        """Create an empty request.

        Args:
            max_operations: Maximum number of operations.
            lease_seconds: Lease of the trees that it creates; None is the server's default.
        """
        self._max_operations, self._lease = max_operations, lease_seconds
        self.operations: list[protocol.Operation] = []
        self.calls: list[tuple[int, StepCall]] = []
        """Calls, each with the index of its operation."""
        self.postponed: list[StepCall] = []
        """Calls that need a further request, because this one creates only some ancestors."""
        self.created: list[tuple[int, NodeContext]] = []
        """Nodes that it creates, each with the index of its operation."""
        self.temporary: list[tuple[int, NodeContext]] = []
        """Nodes that it also drops, each with the index of the operation that creates it."""
        self.task: asyncio.Task[None] | None = None
        self._names: dict[NodeContext, str] = {}

    def add(self, call: StepCall) -> bool:
        """Add the operation of a call, after those that create its node; return whether it fits.

        An empty request takes any call. If it has too little room, it creates only some of the
        missing ancestors, and the call is in `postponed`.

        Raises:
            InputError: nodes that cannot be kept for a further request need more operations than a
                request has.
            ValidationError: the protocol of nodes rejects a field of the call, or of its nodes.
        """
        # A prompt that is only scored has no name yet, so later calls cannot use its node.
        root = call.context.root
        is_temporary = call.root_name is None and root.id is None and root not in self._names
        names = {} if is_temporary else self._names
        missing = self._list_missing(call.context, names)
        num = len(missing) + (2 if is_temporary else 1)
        # Half of a request is left for dropped nodes.
        if self.operations and len(self.operations) + num > max(1, self._max_operations // 2):
            return False
        if num > self._max_operations and is_temporary:
            raise InputError(
                f"scoring this prompt needs {num:,} operations, one for each extension of the "
                f"prompt, but the server accepts at most {self._max_operations:,}; join the texts "
                "into fewer extensions"
            )
        for context in missing[: self._max_operations]:
            self._create(context, call.root_name, names)
        if num > self._max_operations:
            self.postponed.append(call)
            return True
        operation = call.make(node=_refer_to(call.context, names))  # may fail
        self.calls.append((len(self.operations), call))
        self.operations.append(operation)
        if is_temporary:
            self.operations.append(protocol.DropOperation(op="drop", node=names[root]))
        return True

    @staticmethod
    def _list_missing(context: NodeContext, names: dict[NodeContext, str]) -> list[NodeContext]:
        """Return a node and its ancestors that have to be created, the topmost first.

        Args:
            context: The node.
            names: Nodes that the request creates.
        """
        missing: list[NodeContext] = []
        node: NodeContext | None = context
        while node is not None and node.id is None and node not in names:
            missing.append(node)
            node = node.parent
        return missing[::-1]

    def find_failure(
        self, call: StepCall, results: Sequence[protocol.Result]
    ) -> protocol.FailedOperation | None:
        """Return why the node of a call, or an ancestor, was not created; None if all were.

        Args:
            call: The call.
            results: The results of the operations.
        """
        path: set[NodeContext] = set()
        node: NodeContext | None = call.context
        while node is not None:
            path.add(node)
            node = node.parent
        for index, context in (*self.created, *self.temporary):
            result = results[index]
            if context in path and isinstance(result, protocol.FailedOperation):
                return result
        return None

    def drop(self, context: NodeContext) -> None:
        """Add the operation that drops a node."""
        assert context.id is not None
        self.operations.append(protocol.DropOperation(op="drop", node=context.id))

    def _create(
        self, context: NodeContext, root_name: str | None, names: dict[NodeContext, str]
    ) -> None:
        """Add the operation that creates a node, below a node that has an id or a name.

        Args:
            context: The node.
            root_name: Name of the root, if the node is one.
            names: Nodes that the request creates, to which this node is added.
        """
        content, index = context.content, len(self.operations)
        operation: protocol.Operation
        if context.parent is None:
            operation = protocol.RootOperation(
                op="root", prompt=content, name=root_name, seed=0, lease_seconds=self._lease
            )
        else:
            operation = protocol.ExtendOperation(
                op="extend",
                node=_refer_to(context.parent, names),
                index=int(context.path.split("/")[-2].removeprefix("+")),
                **({"text": content} if isinstance(content, str) else {"parts": content}),
            )
        names[context] = f"#{index}"
        if names is self._names:
            context.creator = self
            self.created.append((index, context))
        else:
            self.temporary.append((index, context))
        self.operations.append(operation)


def _refer_to(context: NodeContext, names: dict[NodeContext, str]) -> str:
    """Return the id of a node, or the reference to the operation that creates the node."""
    return names[context] if context.id is None else context.id
