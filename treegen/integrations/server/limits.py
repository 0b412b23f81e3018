"""Limits on the nodes and the searches of clients. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.common.checks import check_counts, check_int, check_number


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLimits:
    """Limits on the nodes of each API key, named as the options of `treegen serve`.

    Raises:
        InputError: A limit cannot be used.
    """

    node_lease: float = 600.0
    """Seconds after the last use of a tree until it is dropped, if the client chooses none."""
    max_node_lease: float = 3600.0
    """Maximum seconds that a client may choose."""
    max_nodes: int = 4096
    """Maximum number of nodes; 0 turns nodes off."""
    max_node_depth: int = 256
    """Maximum number of nodes above a node."""
    max_node_samples: int = 128
    """Maximum number of children of one sample operation."""
    max_node_operations: int = 256
    """Maximum number of operations of one batch."""
    max_node_memory: int | None = None
    """Maximum bytes of keys and values of the nodes' tokens; None is the size of the cache."""
    max_stored_answers: int = 64 * 2**20
    """Maximum bytes of the answers that are stored by idempotency keys."""

    def __post_init__(self) -> None:
        for name in ("node_lease", "max_node_lease"):
            check_number(name, getattr(self, name), above=0)
        check_int("max_nodes", self.max_nodes, minimum=0)
        check_counts(
            max_node_depth=self.max_node_depth,
            max_node_samples=self.max_node_samples,
            max_node_operations=self.max_node_operations,
            max_stored_answers=self.max_stored_answers,
            max_node_memory=self.max_node_memory,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchLimits:
    """Limits on searches, named as the options of `treegen serve`.

    Raises:
        InputError: a limit cannot be used.
    """

    max_searches: int = 16
    """Maximum number of searches at once; further requests get 429. 0 turns searches off."""
    max_key_searches: int | None = None
    """Maximum number of searches of one API key at once; None is `max_searches`."""
    max_search_tokens: int = 16_384
    """Largest budget of decoded tokens of a search, and the budget of requests that name none."""
    max_search_seconds: float = 600.0
    """Largest budget of seconds of a search, and the budget of requests that name none."""

    def __post_init__(self) -> None:
        check_int("max_searches", self.max_searches, minimum=0)
        check_counts(
            max_key_searches=self.max_key_searches, max_search_tokens=self.max_search_tokens
        )
        check_number("max_search_seconds", self.max_search_seconds, above=0)
