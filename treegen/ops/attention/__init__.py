"""Exact attention of query rows over levels of shared and private keys, as one softmax."""

from treegen.ops.attention.api import attend, prepare, prepare_host
from treegen.ops.attention.level import HostLevel, Items, Level
from treegen.ops.attention.merge import merge
from treegen.ops.attention.registry import choose, register
from treegen.ops.attention.types import AttentionOptions, Implementation, PreparedLevels

__all__ = [
    "AttentionOptions",
    "HostLevel",
    "Implementation",
    "Items",
    "Level",
    "PreparedLevels",
    "attend",
    "choose",
    "merge",
    "prepare",
    "prepare_host",
    "register",
]
