"""Limits on how much of a text is read, and on the length of an answer. A text may be hostile."""

from typing import Final

from treegen.common.bounded.patterns import MAX_TEXT as PATTERN_TEXT

# Only this many characters at the end of a text are read.
MAX_TEXT: Final = PATTERN_TEXT
# A longer answer counts as none. This bounds what is stored about a sample.
MAX_ANSWER: Final = 1000
