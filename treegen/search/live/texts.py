"""Texts of samples as they grow: whole characters, and no possible start of a stop string."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from treegen.common.outputs import Completion
from treegen.prompts.detokenize import PARTIAL
from treegen.prompts.replies.replies import ReplyReader, StreamingReply
from treegen.prompts.replies.types import Part
from treegen.prompts.token_text import TokenText
from treegen.prompts.tokens import TAIL
from treegen.search.live.run import SampleDelta


@dataclass(slots=True)
class StreamedText:
    """The text of a sample as it grows. A possible start of a stop string is held back."""

    text: TokenText
    """Decodes tokens."""
    stops: Sequence[str]
    """The stop strings."""
    tokens: list[int]
    """The last tokens of the prompt and all tokens of the sample."""
    shown: int
    """How many of them are decoded."""
    sent: str = ""
    """Text that was returned."""
    held: str = ""
    """Decoded text that is held back."""

    def add(self, tokens: Sequence[int]) -> str:
        """Return the text to send after further tokens."""
        self.tokens += tokens
        before = self.tokens[max(self.shown - TAIL, 0) : self.shown]
        new = self.text.of(before, self.tokens[self.shown :])
        if new.endswith(PARTIAL):  # possibly an incomplete character
            return ""
        self.shown = len(self.tokens)
        self.held += new
        return self._send(len(self.held) - self._at_risk())

    def end(self, whole: str) -> str:
        """Return the rest of the text, now that the whole text is known."""
        self.held = whole[len(self.sent) :]
        return self._send(len(self.held))

    def _send(self, num: int) -> str:
        piece, self.held = self.held[:num], self.held[num:]
        self.sent += piece
        return piece

    def _at_risk(self) -> int:
        """Return the length of the longest end of the text that a stop string may begin with."""
        most = max((len(stop) for stop in self.stops), default=0)
        for num in range(min(most, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-num:]) for stop in self.stops):
                return num
        return 0


class StreamedTexts:
    """Adds text to the SampleDeltas of one call, and yields remaining text when a sample ends."""

    def __init__(
        self,
        text: TokenText,
        stops: Sequence[str],
        replies: ReplyReader | None = None,
        tools: Sequence[Any] | None = None,
    ) -> None:
        """Start without samples.

        Args:
            text: Decodes tokens.
            stops: The stop strings of the call.
            replies: Splits texts into the parts of a SampleDelta; None for no parts.
            tools: Tools of the call.
        """
        self._text, self._stops, self._replies, self._tools = text, stops, replies, tools
        self._prompts: dict[int, list[int]] = {}
        self._growing: dict[tuple[int, int], StreamedText] = {}
        self._replying: dict[tuple[int, int], tuple[StreamedText, StreamingReply]] = {}

    def read(self, place: int, item: Any) -> Iterator[Any]:
        """Yield what to report for an item of a prompt: token ids, a SampleDelta, or a Completion.

        Before a Completion comes a SampleDelta with what no delta has reported yet, if there is
        any.
        """
        if isinstance(item, SampleDelta):
            text = self._of(place, item.sample).add(item.tokens)
            parts: tuple[Part, ...] = ()
            if replying := self._reply_of(place, item.sample):
                growing, reply = replying
                parts = tuple(reply.add(growing.add(item.tokens)))
            yield replace(item, text=text, parts=parts)
            return
        if isinstance(item, Completion):
            growing = self._of(place, item.sample_index)
            num_sent = len(growing.tokens) - len(self._prompts[place][-TAIL:])
            rest, text, parts = slice(num_sent, None), growing.end(item.text), ()
            if replying := self._reply_of(place, item.sample_index):
                growing, reply = replying
                parts = tuple(reply.end(growing.end(reply.decode_completion(item)), item))
            if text or parts or item.tokens[rest]:
                yield SampleDelta(
                    int(item.prompt_id),
                    item.sample_index,
                    item.tokens[rest],
                    item.logprobs[rest],
                    item.top_logprobs[rest],
                    text,
                    parts,
                )
        else:
            prompt = item if self._replies is not None else item[-TAIL:]
            self._prompts[place] = prompt.tolist()
        yield item

    def _of(self, place: int, sample: int) -> StreamedText:
        if (place, sample) not in self._growing:
            self._growing[place, sample] = self._start_text(self._text, place)
        return self._growing[place, sample]

    def _reply_of(self, place: int, sample: int) -> tuple[StreamedText, StreamingReply] | None:
        if self._replies is None:
            return None
        if (place, sample) not in self._replying:
            reply = self._replies.start_stream(self._prompts[place], self._tools)
            growing = self._start_text(self._replies.text, place)
            self._replying[place, sample] = growing, reply
        return self._replying[place, sample]

    def _start_text(self, text: TokenText, place: int) -> StreamedText:
        tail = self._prompts[place][-TAIL:]
        return StreamedText(text, self._stops, tail, len(tail))
