"""Attention of query rows over levels of shared and own keys: one softmax, exactly."""

from treegen.attention.api import attend, prepare, register
from treegen.attention.level import Level
from treegen.attention.merge import merge
from treegen.attention.types import Implementation, Options, Prepared

__all__ = [
    "Implementation",
    "Level",
    "Options",
    "Prepared",
    "attend",
    "merge",
    "prepare",
    "register",
]
