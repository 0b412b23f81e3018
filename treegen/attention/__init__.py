"""Attention of query rows over levels of shared and own keys: one softmax, exactly."""

from treegen.attention.api import attend, prepare, prepare_host
from treegen.attention.implementations import choose, register
from treegen.attention.level import HostLevel, Items, Level
from treegen.attention.merge import merge
from treegen.attention.types import Implementation, Options, Prepared

__all__ = [
    "HostLevel",
    "Implementation",
    "Items",
    "Level",
    "Options",
    "Prepared",
    "attend",
    "choose",
    "merge",
    "prepare",
    "prepare_host",
    "register",
]
