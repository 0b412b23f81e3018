"""The limits on the nodes of each API key. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.common.checks import check_int, check_number
from treegen.errors import InputError, arg


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
            check_number(name, getattr(self, name))
            if not getattr(self, name) > 0:
                raise InputError(f"{arg(name)} must be more than 0 seconds")
        check_int("max_nodes", self.max_nodes, least=0)
        for name in (
            "max_node_depth",
            "max_node_samples",
            "max_node_operations",
            "max_stored_answers",
        ):
            check_int(name, getattr(self, name), least=1)
        if self.max_node_memory is not None:
            check_int("max_node_memory", self.max_node_memory, least=1)
