"""Exact attention of query rows over levels of shared and private keys, as one softmax."""

from treegen.ops.attention.api import attend as attend
from treegen.ops.attention.api import prepare as prepare
from treegen.ops.attention.api import prepare_host as prepare_host
from treegen.ops.attention.level import HostLevel as HostLevel
from treegen.ops.attention.level import Items as Items
from treegen.ops.attention.level import Level as Level
from treegen.ops.attention.merge import merge as merge
from treegen.ops.attention.registry import choose as choose
from treegen.ops.attention.registry import register as register
from treegen.ops.attention.types import AttentionOptions as AttentionOptions
from treegen.ops.attention.types import Implementation as Implementation
from treegen.ops.attention.types import PreparedLevels as PreparedLevels
