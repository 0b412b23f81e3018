"""The texts of samples while they grow: whole characters, and nothing that may yet be a stop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegen.outputs import Completion
from treegen.prompts.detokenize import PARTIAL
from treegen.prompts.token_text import Text
from treegen.prompts.tokens import TAIL
from treegen.search.live.run import News


@dataclass(slots=True)
class Growing:
    """The text of a sample as it grows. What may be the start of a stop string is held back.

    tokens: the last tokens of the prompt and all of the sample's. shown: how many of them have
    given their text. sent, held: text that was given, and text that waits.
    """

    text: Text
    stops: Sequence[str]
    tokens: list[int]
    shown: int
    sent: str = ""
    held: str = ""

    def add(self, tokens: Sequence[int]) -> str:
        """The text to send after further tokens."""
        self.tokens += tokens
        before = self.tokens[max(self.shown - TAIL, 0) : self.shown]
        new = self.text.of(before, self.tokens[self.shown :])
        if new.endswith(PARTIAL):  # perhaps a character that is not whole yet
            return ""
        self.shown = len(self.tokens)
        self.held += new
        return self._send(len(self.held) - self._at_risk())

    def end(self, whole: str) -> str:
        """The rest of the text, which is known now."""
        self.held = whole[len(self.sent) :]
        return self._send(len(self.held))

    def _send(self, num: int) -> str:
        piece, self.held = self.held[:num], self.held[num:]
        self.sent += piece
        return piece

    def _at_risk(self) -> int:
        """Length of the longest end of the text that a stop string may begin with."""
        most = max((len(stop) for stop in self.stops), default=0)
        for num in range(min(most, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-num:]) for stop in self.stops):
                return num
        return 0


class GrowingTexts:
    """Gives the News of one call's samples their text, and tells the rest when a sample ends."""

    def __init__(self, text: Text, stops: Sequence[str]) -> None:
        """No sample has begun. stops: the stop strings of the call."""
        self._text, self._stops = text, stops
        self._tails: dict[int, list[int]] = {}
        self._growing: dict[tuple[int, int], Growing] = {}

    def read(self, place: int, item: Any) -> Iterator[Any]:
        """What to tell of an item of a prompt: its token ids, News of a sample, or its Completion.

        Before a Completion come News of what no News have told yet, if there is anything.
        """
        if isinstance(item, News):
            yield replace(item, text=self._of(place, item.sample).add(item.tokens))
            return
        if isinstance(item, Completion):
            growing = self._of(place, item.sample_index)
            told = len(growing.tokens) - len(self._tails[place])
            rest, text = slice(told, None), growing.end(item.text)
            if text or item.tokens[rest]:
                yield News(
                    int(item.prompt_id),
                    item.sample_index,
                    item.tokens[rest],
                    item.logprobs[rest],
                    item.top_logprobs[rest],
                    text,
                )
        else:
            self._tails[place] = item[-TAIL:].tolist()
        yield item

    def _of(self, place: int, sample: int) -> Growing:
        if (place, sample) not in self._growing:
            tail = list(self._tails[place])
            self._growing[place, sample] = Growing(self._text, self._stops, tail, len(tail))
        return self._growing[place, sample]
