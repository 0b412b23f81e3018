"""The nodes that clients hold: trees with leases, and the limits and the memory of each client."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from treegen.common.outputs import Completion
from treegen.common.params import SamplingParams
from treegen.integrations.nodes.protocol import MAX_INDEX, Memory, TreeAnswer
from treegen.integrations.server.errors import StatusError
from treegen.integrations.server.limits import NodeLimits
from treegen.integrations.server.requests import RequestError
from treegen.llm.async_llm import AsyncLLM
from treegen.prompts.tree import Message
from treegen.search.live.backend import LiveBackend
from treegen.search.live.pending import LiveContext

_MAX_NAMED_TREES: Final = 3  # trees that an error names for dropping


@dataclass(slots=True, eq=False)
class Tree:
    """A tree of a client."""

    client: Client
    """The client."""
    backend: LiveBackend
    """Computes its nodes."""
    origin: str
    """Text that the seeds of its samples follow from."""
    params: SamplingParams
    """Default sampling parameters, with the seed of the tree."""
    lease: float
    """Seconds after the last use until it is dropped."""
    prompt: str | None
    """Text of the prompt, if it was given as text."""
    messages: Sequence[Message] = ()
    """Messages of the prompt without images, if later messages may follow them."""
    template: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the chat template for later messages."""
    root: ServedNode = field(init=False)
    """The root."""
    num_nodes: int = 0
    """Number of nodes."""
    num_tokens: int = 0
    """Number of tokens of the nodes."""
    last_used: float = field(default_factory=time.monotonic)
    """When it was last used, on the clock of `time.monotonic`."""
    num_open: int = 0
    """Number of operations that use it now."""
    timer: asyncio.TimerHandle | None = None
    """Drops it when its lease ends."""

    def expires_in(self) -> float:
        """Return the seconds until the lease ends."""
        return max(0.0, self.last_used + self.lease - time.monotonic())

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Renew the lease at the start and the end of the block; it does not end in between."""
        self.num_open += 1
        self.last_used = time.monotonic()
        try:
            yield
        finally:
            self.num_open -= 1
            self.last_used = time.monotonic()


@dataclass(slots=True, eq=False)
class ServedNode:
    """A node of a client."""

    id: str
    """Its id, which cannot be guessed."""
    tree: Tree
    """Its tree."""
    parent: ServedNode | None
    """The node above; None for a root."""
    path: str
    """Indices below the root, such as "0/+0/2"."""
    depth: int
    """Number of nodes above."""
    index: int
    """Index among the samples or the extensions of the parent."""
    context: LiveContext
    """Everything up to its end."""
    text: str = ""
    """Its text, if it was given as text."""
    completion: Completion | None = None
    """The sample that it is; None for given text."""
    children: list[ServedNode] = field(default_factory=list)
    """Nodes below it that are not dropped."""
    num_drawn: int = 0
    """Index of the next sample."""
    num_extended: int = 0
    """Index of the next extension."""
    is_live: bool = True
    """Whether it was not dropped."""
    calls: set[asyncio.Future[Any]] = field(default_factory=set)
    """Calls of the engine that end when it is dropped."""

    @property
    def key(self) -> str:
        """Its key in the backend, from which the seeds of its samples follow with the origin."""
        return f"/{self.path}/" if self.path else "/"

    @property
    def own_text(self) -> str:
        """Its own text; empty for roots of token ids and messages."""
        return self.completion.text if self.completion is not None else self.text

    @property
    def num_tokens(self) -> int:
        """Number of tokens that it adds to the node above."""
        above = self.parent.context.num_tokens if self.parent is not None else 0
        # An extension may merge with the last tokens of a prompt.
        return max(0, self.context.num_tokens - above)

    def walk(self) -> Iterator[ServedNode]:
        """Yield this node and all below it, parents first."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children)

    def ancestors(self) -> Iterator[ServedNode]:
        """Yield this node and all above it, root last."""
        node: ServedNode | None = self
        while node is not None:
            yield node
            node = node.parent


@dataclass(slots=True, eq=False)
class Client:
    """The nodes of one API key."""

    name: str
    """Its name in metrics."""
    nodes: dict[str, ServedNode] = field(default_factory=dict)
    """Its nodes by id."""
    trees: dict[Tree, None] = field(default_factory=dict)
    """Its trees."""
    num_tokens: int = 0
    """Number of tokens of its nodes."""
    reserved_nodes: int = 0
    """Nodes that running operations may make."""
    reserved_tokens: int = 0
    """Tokens of these nodes, at most."""
    encoding: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while a text of the client waits for the tokenizer's thread or is in it, so that the
    texts of other clients need not wait for more than one."""


@dataclass(slots=True, eq=False)
class Reservation:
    """Nodes and tokens that an operation may make, which count towards the limits of its client."""

    client: Client
    """The client."""
    nodes: int
    """Number of nodes."""
    tokens: int
    """Their tokens, at most."""

    def release_part(self, nodes: int, tokens: int) -> None:
        """Release the reservation of nodes that exist now, or that will not be made."""
        self.nodes -= nodes
        self.tokens -= tokens
        self.client.reserved_nodes -= nodes
        self.client.reserved_tokens -= tokens


class NodeStore:
    """The nodes of all clients. One event loop uses it.

    Attributes:
        limits: Limits on the nodes of each client.
        max_tokens: Maximum number of tokens of a client's nodes.
        clients: The clients by name.
    """

    def __init__(self, served: AsyncLLM, limits: NodeLimits) -> None:
        """Create a store without nodes.

        Args:
            served: Computes the nodes.
            limits: Limits on the nodes of each client.
        """
        self._served, self.limits = served, limits
        pool, spec = served.llm.cache.pool, served.llm.spec
        # A model of recurrent layers alone has no keys and values.
        self._token_bytes = max(spec.kv_bytes_per_token, 1)
        self.max_tokens = pool.num_pages * served.llm.cache.page_size
        if limits.max_node_memory is not None:
            self.max_tokens = limits.max_node_memory // self._token_bytes
        self.clients: dict[str, Client] = {}

    def client(self, name: str) -> Client:
        """Return the client of a name."""
        return self.clients.setdefault(name, Client(name))

    def memory(self, client: Client) -> Memory:
        """Return the number of a client's nodes and tokens, their bytes, and its limits."""
        return Memory(
            nodes=len(client.nodes),
            max_nodes=self.limits.max_nodes,
            tokens=client.num_tokens,
            max_tokens=self.max_tokens,
            bytes=client.num_tokens * self._token_bytes,
            max_samples=self.limits.max_node_samples,
            max_operations=self.limits.max_node_operations,
        )

    def find(self, client: Client, name: str, param: str = "node") -> ServedNode:
        """Return the node with an id.

        Args:
            client: The client that asks.
            name: The id.
            param: Field of the request that has the id.

        Raises:
            StatusError: The client has no such node.
        """
        node = client.nodes.get(name)
        if node is not None and node.tree.backend.closed:  # the engine has failed and restarted
            self.drop(node.tree.root)
            node = None
        if node is None:
            raise StatusError(
                404,
                f"there is no node {name!r:.80}: it was dropped, its lease has ended, or the "
                "server was restarted; create its tree again, with the same seed and paths",
                param,
            )
        return node

    def check_depth(self, node: ServedNode) -> None:
        """Raise StatusError if a node may not have children."""
        if node.depth >= self.limits.max_node_depth:
            raise StatusError(
                400,
                f"the node has the depth {node.depth:,}, which is the limit; use a node closer to "
                "the root",
                "node",
            )

    def lease(self, seconds: float | None) -> float:
        """Return the lease of a tree for which a client has chosen a time, or None."""
        return min(seconds or self.limits.node_lease, self.limits.max_node_lease)

    @contextmanager
    def reserve(
        self,
        client: Client,
        nodes: int,
        tokens: int,
        fields: tuple[str | None, str | None] = (None, None),
    ) -> Iterator[Reservation]:
        """Reserve nodes and tokens that the block may make.

        Args:
            client: The client.
            nodes: Number of nodes.
            tokens: Their tokens, at most.
            fields: Fields of the request that decide the two numbers; None for no field.

        Raises:
            StatusError: The client has no room for them.
        """
        num_nodes = len(client.nodes) + client.reserved_nodes
        num_tokens = client.num_tokens + client.reserved_tokens
        for what, name, requested, taken, limit in (
            ("nodes", fields[0], nodes, num_nodes, self.limits.max_nodes),
            ("tokens", fields[1], tokens, num_tokens, self.max_tokens),
        ):
            if taken + requested > limit:
                less = f", or lower {name}" if name else ""
                raise StatusError(
                    429,
                    f"your trees have {taken:,} {what}, and up to {requested:,} more would exceed "
                    f"the limit max_{what} of {limit:,}; drop nodes or trees (DELETE /v1/nodes/ID)"
                    f", such as those in `free`{less}",
                    name,
                    free=[tree.model_dump() for tree in self.trees(client)[:_MAX_NAMED_TREES]],
                )
        client.reserved_nodes += nodes
        client.reserved_tokens += tokens
        reserved = Reservation(client, nodes, tokens)
        try:
            yield reserved
        finally:
            reserved.release_part(reserved.nodes, reserved.tokens)

    def trees(self, client: Client) -> list[TreeAnswer]:
        """Return the trees of a client, least recently used first."""
        now = time.monotonic()
        return [
            TreeAnswer(
                id=tree.root.id,
                nodes=tree.num_nodes,
                tokens=tree.num_tokens,
                idle_seconds=max(0.0, now - tree.last_used),
                expires_in=tree.expires_in(),
            )
            for tree in sorted(client.trees, key=lambda tree: tree.last_used)
        ]

    def add_root(self, tree: Tree, context: LiveContext) -> ServedNode:
        """Add a tree, and return its root.

        Args:
            tree: The tree.
            context: The context of the prompt.
        """
        node = ServedNode(_new_id(), tree, None, "", 0, 0, context, tree.prompt or "")
        tree.root = node
        tree.client.trees[tree] = None
        self._add(node)
        self._check_lease(tree)
        return node

    def add_child(
        self,
        parent: ServedNode,
        index: int,
        context: LiveContext,
        text: str,
        completion: Completion | None = None,
    ) -> ServedNode:
        """Add a node below another.

        Args:
            parent: The node above.
            index: Index of the node among the samples or extensions of the parent.
            context: Its context.
            text: Its text, if it is given text.
            completion: The sample that it is; None for given text.
        """
        step = str(index) if completion is not None else f"+{index}"
        path = f"{parent.path}/{step}" if parent.path else step
        node = ServedNode(
            _new_id(), parent.tree, parent, path, parent.depth + 1, index, context, text, completion
        )
        parent.children.append(node)
        self._add(node)
        return node

    def _add(self, node: ServedNode) -> None:
        tree, tokens = node.tree, node.num_tokens
        tree.client.nodes[node.id] = node
        tree.num_nodes += 1
        tree.num_tokens += tokens
        tree.client.num_tokens += tokens

    def drop(self, node: ServedNode) -> tuple[int, int]:
        """Drop a node and all nodes below it; return their number and that of their tokens."""
        if not node.is_live:
            return 0, 0
        tree, client = node.tree, node.tree.client
        nodes = list(node.walk())
        num_tokens = sum(dropped.num_tokens for dropped in nodes)
        for dropped in nodes:
            del client.nodes[dropped.id]
            dropped.is_live = False
            for call in dropped.calls:
                call.cancel()
        if node.parent is not None:
            node.parent.children.remove(node)
        tree.num_nodes -= len(nodes)
        tree.num_tokens -= num_tokens
        client.num_tokens -= num_tokens
        if node is tree.root:
            del client.trees[tree]
            if tree.timer is not None:
                tree.timer.cancel()
        self._served.release(tree.backend, [dropped.context for dropped in reversed(nodes)])
        return len(nodes), num_tokens

    def _check_lease(self, tree: Tree) -> None:
        """Drop a tree when its lease ends."""
        if tree.num_open or tree.expires_in() > 0:
            wait = max(tree.expires_in(), 0.05)
            tree.timer = asyncio.get_running_loop().call_later(wait, self._check_lease, tree)
        else:
            self.drop(tree.root)


@dataclass(slots=True)
class Changes:
    """What an operation has changed, to undo it if its client does not get the answer."""

    nodes: list[ServedNode] = field(default_factory=list)
    """Nodes that it has made."""
    indices: list[tuple[ServedNode, str, int, int]] = field(default_factory=list)
    """Counters of indices: the node, the counter's name, its value before and after."""

    def take(self, node: ServedNode, counter: str, first: int | None, num: int) -> int:
        """Reserve indices of children, and return the first.

        Args:
            node: The node above.
            counter: Name of the node's counter.
            first: The first index; None continues after the highest so far.
            num: Number of indices.
        """
        before: int = getattr(node, counter)
        first = before if first is None else first
        after = max(before, first + num)
        if first + num - 1 > MAX_INDEX:
            raise RequestError(
                f"a child's index must be at most {MAX_INDEX:,}; use a lower first index",
                "index" if counter == "num_extended" else "first",
            )
        setattr(node, counter, after)
        self.indices.append((node, counter, before, after))
        return first

    def undo(self, store: NodeStore) -> None:
        """Drop the nodes, and give back the indices that no later operation follows."""
        for node in self.nodes:
            store.drop(node)
        for node, counter, before, after in reversed(self.indices):
            if getattr(node, counter) == after:
                setattr(node, counter, before)
        self.nodes.clear()
        self.indices.clear()


def _new_id() -> str:
    return f"node-{secrets.token_urlsafe(18)}"
