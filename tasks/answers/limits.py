"""How much of a text is read, and how long an answer may be. A text may be hostile."""

from typing import Final

# The last characters of a text, which are all that is read.
MAX_TEXT: Final = 200_000
# Longer answers are none. So what is stored about a sample stays small.
MAX_ANSWER: Final = 1000
