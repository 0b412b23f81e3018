"""How much of a text is read, and how long an answer may be. A text may be hostile."""

from typing import Final

from treegen.common.bounded.patterns import MAX_TEXT as PATTERN_TEXT

# The last characters of a text, which are all that is read.
MAX_TEXT: Final = PATTERN_TEXT
# Longer answers are none. So what is stored about a sample stays small.
MAX_ANSWER: Final = 1000
