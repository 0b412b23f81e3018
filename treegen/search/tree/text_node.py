"""The texts of a search tree and their paths, as strategies, reports and records read them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from treegen.common.lifetimes import NonCopyable
from treegen.common.outputs import Completion

NodeEnd = Literal["stop", "length", "confidence", "error", "given"]


class TextNode(NonCopyable):
    """A piece of text in a tree, and what was recorded about it.

    Attributes:
        parent: The node above it; None for a root.
        children: The nodes directly below it, in order.
        depth: Number of nodes above it.
        key: Its name, made of the search's name and its path; seeds follow from it.
        order: Its place among its siblings; samples come before given text.
        text: Its own text.
        completion: The sample that it is; None for given text.
        value: The number that an evaluation gave it, for strategies and reports; None without one.
        visits: How often a strategy has counted a value for it; 0 for strategies that do not count.
        prior: How likely a strategy found it before it was visited; None without one.
        scores: The number that each scorer gave it, by the scorer's name.
        pruned: Whether a strategy has pruned it.
        pruned_because: Why, in a few words; empty if unknown.
        dropped: Whether the search function has dropped it.
        restart: How often the search had started again at its root when the node was made.
        data: Anything that the user wants to store with it. Records have it as JSON, or as its
            repr.
    """

    __slots__ = (
        "children",
        "completion",
        "data",
        "depth",
        "dropped",
        "key",
        "order",
        "parent",
        "prior",
        "pruned",
        "pruned_because",
        "restart",
        "scores",
        "text",
        "value",
        "visits",
    )

    def __init__(
        self,
        parent: Self | None,
        key: str,
        text: str,
        completion: Completion | None,
        order: tuple[int, int],
        restart: int,
    ) -> None:
        """Create a node about which nothing is recorded.

        Args:
            parent: The node above it; None for a root.
            key: Its name.
            text: Its own text.
            completion: The sample that it is; None for given text.
            order: Its place among its siblings.
            restart: How often the search had started again at its root.
        """
        self.parent, self.key, self.text = parent, key, text
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.completion = completion
        self.order, self.restart = order, restart
        self.children: list[Self] = []
        self.forget()

    def forget(self) -> None:
        """Clear what was recorded about the node; it stays in its tree."""
        self.value: float | None = None
        self.visits = 0
        self.prior: float | None = None
        self.scores: dict[str, float] = {}
        self.pruned, self.pruned_because, self.dropped = False, "", False
        self.data: Any = None

    @property
    def tokens(self) -> tuple[int, ...]:
        """Generated token ids, including the stop token."""
        return self.completion.tokens if self.completion else ()

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Natural-log probability of each generated token under the model."""
        return self.completion.logprobs if self.completion else ()

    @property
    def logprob(self) -> float:
        """Natural-log probability of the node's own tokens; 0 for given text."""
        return sum(self.logprobs)

    @property
    def finish_reason(self) -> NodeEnd:
        """How the node's text ended: "given", "stop", "length", "confidence" or "error"."""
        return self.completion.finish_reason if self.completion else "given"

    @property
    def stop(self) -> str | int | None:
        """The stop string or token id that ended it; None if neither did."""
        return self.completion.stop if self.completion else None

    @property
    def is_leaf(self) -> bool:
        """Whether it has no children."""
        return not self.children

    @property
    def path(self) -> list[Self]:
        """Nodes from the root to this one."""
        nodes, node = [self], self
        while node.parent is not None:
            node = node.parent
            nodes.append(node)
        return nodes[::-1]

    @property
    def path_text(self) -> str:
        """Text after the prompt, up to and including this node."""
        return "".join(node.text for node in self.path[1:])

    @property
    def path_logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of all generated tokens from the root to this node."""
        return tuple(value for node in self.path for value in node.logprobs)

    def walk(self) -> Iterator[Self]:
        """Yield this node and all below it, parents first, siblings in order."""
        stack = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(reversed(node.children))
