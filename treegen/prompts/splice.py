"""Encodes texts that share their starts: each shared start once, then the rest spliced on.

    shared start     |[tok][tok][tok][tok][tok][tok][t]|            encoded once
    window                          |[to][tok][tok][to|k][tok][tok] its end again and what follows
    whole text       |[tok][tok][tok][tok]*[tok][to|k][tok][tok]    spliced at *, where both agree

The texts form a tree of shared starts. Of a text below a shared start only a window is encoded;
all windows of a level go to the tokenizer in one call. The window is spliced to the shared start
between tokens that both have: equal ids at equal characters, over a run of several tokens. The
result is what the whole text encodes to, for these reasons:

- Words, the pieces that the pre-tokenizer cuts, are encoded independently. Where both sides agree
  that a word starts, the window continues like the whole text, as long as the pre-tokenizer looks
  no further than the run of equal tokens. Pre-tokenizers in use cut from left to right and look
  ahead no further than the end of a run of spaces or digits. Where such a run continues past the
  shared start, the two sides disagree. This is verified, not proved.
- Inside a word, byte pair encoding is local. Tokens encode their text if and only if each two
  neighbours encode theirs, because the first merge across a border would also happen between these
  two alone. So encodings with a token in common can be spliced at it. This is proved for plain
  merges. Both sides must lie in one word of the whole text. That is certain where there is no
  pre-tokenizer (Llama 2, Gemma), and verified by a longer run elsewhere.
- Other models (Unigram, WordPiece) are spliced only where words start.
- Added tokens such as "<|im_end|>" are cut out before all this. So the splice keeps at least the
  length of the longest added token from the end of the shared start.

Where the two sides do not agree, the window is widened; finally the whole text is encoded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Encoding
    from transformers import PreTrainedTokenizerBase

    Ids = NDArray[np.int32]
    Rows = NDArray[np.int32]  # [4, number of tokens]

# The rows of an encoding, one column for each token: its id, where its characters start and stop,
# and 1 where a word starts.
ID, START, STOP, OPENS = range(4)

WINDOW_WIDTHS: Final = (16, 64, 256)
"""How many tokens of the shared start a window repeats, attempt by attempt."""
EDGE: Final = 2 * WINDOW_WIDTHS[-1]
"""How many tokens at each end of a long text get characters and words."""
WINDOW_CHARS: Final = 128
"""Characters that the first window repeats, about: the cost of using a shared start."""
AT_WORD: Final = (2, 4)
"""Tokens before and after the start of a word that must agree to splice there."""
IN_WORD: Final = (6, 6)
"""Tokens before and after a position inside a word that must agree to splice there."""


@dataclass(frozen=True, slots=True)
class TextSpan:
    """A text to encode: a text of the call, or a start that several of them share."""

    text: str
    parent: int | None
    """Index of the longest shared start of the text; None if there is none."""
    depth: int
    """The number of nested shared starts above it."""


def shared_starts(texts: Sequence[str]) -> tuple[list[TextSpan], list[int]]:
    """Return spans for texts and for the starts worth sharing, and the index of each text's span.

    A shared start precedes the spans that continue it.
    """
    spans: list[TextSpan] = []
    span_of_text = [-1] * len(texts)
    # Each group: texts, a lower bound of their common characters, their last shared start.
    groups: list[tuple[list[int], int, int | None]] = [(list(range(len(texts))), 0, None)]
    while groups:
        members, agreed, parent = groups.pop()
        length = _common_length([texts[member] for member in members], agreed)
        branches: dict[str, list[int]] = {}
        for member in members:
            branches.setdefault(texts[member][length : length + 1], []).append(member)
        complete = branches.pop("", [])
        # The first shared start of a text costs a window. Deeper ones need no further window.
        above = TextSpan("", None, -1) if parent is None else spans[parent]
        cost = WINDOW_CHARS * (len(members) if parent is None else 1)
        if complete or (length - len(above.text)) * (len(members) - 1) > cost:
            spans.append(TextSpan(texts[members[0]][:length], parent, above.depth + 1))
            parent = len(spans) - 1
        for member in complete:
            span_of_text[member] = len(spans) - 1
        groups += [(branch, length, parent) for branch in branches.values()]
    return spans, span_of_text


def _common_length(texts: Sequence[str], agreed: int) -> int:
    """Return the length of the common start of all texts, which is at least `agreed` characters."""
    common = texts[0][agreed:]
    for text in texts:
        if text.startswith(common, agreed):
            continue
        low, high = 0, len(common) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(common[low:middle], agreed + low):
                low = middle
            else:
                high = middle - 1
        common = common[:low]
    return agreed + len(common)


@dataclass(frozen=True, slots=True)
class _SplicePoint:
    """Where a window is spliced to a shared start."""

    start_length: int
    """Tokens of the shared start that stay."""
    window_start: int
    """The first token of the window that follows them."""
    before: int
    """Number of tokens before this position that must agree."""
    after: int
    """Number of tokens after this position that must agree."""

    def holds(self, start: Rows, window: Rows) -> bool:
        """Whether a shared start and a window agree around this position."""
        left = start[:, self.start_length - self.before : self.start_length + self.after]
        right = window[:, self.window_start - self.before : self.window_start + self.after]
        return np.array_equal(left, right)


class Splicer:
    """Encodes texts that continue texts encoded before, without special tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        backend: Any = tokenizer.backend_tokenizer
        added = tokenizer.added_tokens_decoder.values()
        # One extra, because the next character decides whether a single_word token matches.
        self._margin = 1 + max((len(token.content) for token in added), default=0)
        if backend.normalizer is not None and any(token.normalized for token in added):
            self._margin *= 4  # An added token may get shorter when it is normalized.
        model = backend.model
        self._contexts: list[tuple[tuple[int, int], bool]] = [(AT_WORD, True)]
        if type(model).__name__ == "BPE" and not (
            model.dropout
            or model.ignore_merges
            or model.continuing_subword_prefix
            or model.end_of_word_suffix
        ):
            self._contexts.append((IN_WORD, False))

    def encode(
        self, texts: Sequence[str], starts: Sequence[tuple[int, Rows] | None]
    ) -> list[tuple[Rows, Rows]]:
        """Return the rows of each text in two parts: kept from its shared start, and the rest.

        Args:
            texts: The texts to encode.
            starts: For each text the number of characters and the rows of its shared start, or
                None.
        """
        none = np.empty((4, 0), dtype=np.int32)
        parts: list[tuple[Rows, Rows]] = [(none, none)] * len(texts)
        todo = list(range(len(texts)))
        for width in (*WINDOW_WIDTHS, None):
            distinct = {id(start): start for start in (starts[index] for index in todo)}
            opened = {key: self._window(start, width) for key, start in distinct.items()}
            windows = [opened[id(starts[index])] for index in todo]
            chars = [char for _, char in windows]
            rows = self._rows([texts[index] for index in todo], chars)
            points: dict[int, _SplicePoint] = {}
            failed = []
            for index, (token, char), window in zip(todo, windows, rows, strict=True):
                start = starts[index]
                if start is None or char == 0:
                    parts[index] = (none, window)
                    continue
                # Windows on one shared start begin alike, so mostly the same point fits.
                point = points.get(id(start))
                if point is None or not point.holds(start[1], window):
                    point = self._find_point(start, token, window)
                if point is None:
                    failed.append(index)
                else:
                    points[id(start)] = point
                    parts[index] = (
                        start[1][:, : point.start_length],
                        window[:, point.window_start :],
                    )
            todo = failed
        return parts

    def _rows(self, texts: Sequence[str], chars: Sequence[int]) -> list[Rows]:
        """Return the rows of texts, each encoded from its character in `chars` to its end."""
        if not texts:
            return []
        batch = self._tokenizer(
            [text[char:] for text, char in zip(texts, chars, strict=True)],
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # no warning about a text that is longer than the model allows
        )
        return list(map(_rows_of, batch.encodings, batch["input_ids"], chars))

    def _window(self, start: tuple[int, Rows] | None, width: int | None) -> tuple[int, int]:
        """Return the token and the character at which a window opens; (0, 0): the whole text."""
        if start is None or width is None:
            return 0, 0
        length, rows = start
        token = int(np.searchsorted(rows[START], length - self._margin, "right")) - width
        if token <= 0:
            return 0, 0
        # Open where a word starts if possible: from there the tokens are those of the whole text.
        lowest = max(1, token - width // 2)
        words = np.flatnonzero(rows[OPENS, lowest : token + 1])
        if words.size:
            token = lowest + int(words[-1])
        # A token may begin with the space before its word although its offsets exclude the space.
        return token, int(min(rows[STOP, token - 1], rows[START, token]))

    def _find_point(self, start: tuple[int, Rows], token: int, window: Rows) -> _SplicePoint | None:
        """Return where a window that opens at `token` of the shared start is spliced, or None."""
        length, rows = start
        tail = rows[:, token:]
        # Tokens are matched by the character that they start at. Several tokens may be bytes of one
        # character; those are matched by their order.
        rank = np.arange(tail.shape[1]) - np.searchsorted(tail[START], tail[START])
        match = np.searchsorted(window[START], tail[START]) + rank
        inside = match < window.shape[1]
        if not inside.any():
            return None
        equal = tail == window[:, np.where(inside, match, 0)]
        agrees = equal.all(axis=0) & inside
        linked = agrees[1:] & agrees[:-1] & (match[1:] == match[:-1] + 1)
        run = np.concatenate([[0], np.cumsum(linked)])
        for (before, after), at_word in self._contexts:
            links = before + after - 1
            at = before + np.flatnonzero(run[links:] - run[:-links] == links)
            at = at[tail[START, at] <= length - self._margin]
            if at_word:
                at = at[tail[OPENS, at] == 1]
            if at.size:
                return _SplicePoint(token + int(at[0]), int(match[at[0]]), before, after)
        return None


def _rows_of(encoding: Encoding, ids: list[int], char: int) -> Rows:
    """Return the rows of an encoding of the tokenizers library whose text starts at `char`.

    A long encoding gets characters and words at its two ends only, where splices are, because
    looking up those of all tokens takes as long as encoding the text. A window that would open in
    between finds character 0, which means the whole text.
    """
    rows = np.zeros((4, len(ids)), dtype=np.int32)
    rows[ID] = ids
    if len(ids) <= 2 * EDGE:
        _fill(rows, encoding.offsets, encoding.word_ids, char)
        return rows
    for edge in (range(EDGE), range(len(ids) - EDGE, len(ids))):
        offsets = [encoding.token_to_chars(token) or (0, 0) for token in edge]
        words = [encoding.token_to_word(token) for token in edge]
        _fill(rows[:, edge.start : edge.stop], offsets, words, char)
    rows[START, EDGE:-EDGE] = rows[START, EDGE - 1]  # in order, for binary search
    rows[OPENS, -EDGE] = 2  # unknown: equal to neither 0 nor 1
    return rows


def _fill(rows: Rows, offsets: list[tuple[int, int]], words: list[int | None], char: int) -> None:
    """Write the characters and words of tokens to their rows."""
    characters = np.fromiter(chain.from_iterable(offsets), np.int32, count=2 * len(offsets))
    rows[START], rows[STOP] = characters[::2] + char, characters[1::2] + char
    numbers = np.array(words, dtype=np.float64)  # None becomes nan, unequal to everything
    rows[OPENS, :1] = 1
    rows[OPENS, 1:] = numbers[1:] != numbers[:-1]
