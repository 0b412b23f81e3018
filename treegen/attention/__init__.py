"""Attention of query rows over levels of shared and own keys: one softmax, exactly."""

from treegen.attention.api import attend, choose, prepare, prepare_host, register
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
