"""Splits a growing text into thoughts, text and tool calls.

The parts do not depend on how the text is cut into pieces, so a whole text is one piece.
"""

from __future__ import annotations

from collections.abc import Iterator

from treegen.prompts.replies.arguments import ToolSchemas
from treegen.prompts.replies.formats import ToolFormat
from treegen.prompts.replies.readers import Channel
from treegen.prompts.replies.scan import NeedMoreText, NotACall, Scan
from treegen.prompts.replies.types import Part, ReasoningPart, TextPart, ToolCall
from treegen.prompts.thinking import Tags


class ReplyParser:
    """Splits a text as it grows. Text that may become a mark or a call is held back."""

    def __init__(
        self,
        form: ToolFormat,
        tools: ToolSchemas,
        tags: Tags | None = None,
        *,
        is_thinking: bool = False,
    ) -> None:
        """Start with an empty text.

        Args:
            form: The format of calls.
            tools: The schemas of their parameters.
            tags: The tags around the reasoning; None for none.
            is_thinking: Whether the prompt has opened the reasoning.
        """
        self._form, self._tools, self._tags = form, tools, tags
        self._text, self._ended = "", False
        self._thinks = is_thinking
        self._may_think = tags is not None and not form.has_channels
        self._begun = False  # whether anything but space has arrived since the reasoning
        self._space = ""  # space that is emitted once text follows
        self._has_emitted = {TextPart: False, ReasoningPart: False}  # which kinds were emitted
        self._skips = False  # whether space before the text is dropped
        self._after_call = False  # whether the last part was a call

    def add(self, piece: str) -> list[Part]:
        """Return the parts that a further piece of text completes."""
        self._text += piece
        return list(self._parts())

    def end(self, piece: str = "") -> list[Part]:
        """Return the remaining parts.

        Args:
            piece: The last piece of text.
        """
        self._ended = True
        parts = self.add(piece)
        if self._space and not self._thinks and not self._after_call:
            parts.append(TextPart(self._space))
        return parts

    def _parts(self) -> Iterator[Part]:
        try:
            while self._text:
                if self._thinks:
                    yield from self._think()
                else:
                    yield from self._emit_parts()
        except NeedMoreText:
            if self._ended:
                raise AssertionError(
                    "a reader waits for the end of a text that has ended"
                ) from None

    def _think(self) -> Iterator[Part]:
        """Yield thoughts up to the closing tag, or in a channel up to the next mark."""
        if self._tags is not None and not self._form.has_channels:
            marks: tuple[str, ...] = (self._tags.close,)
            if not self._begun:  # the model may repeat the opening tag of the prompt
                text = self._text.lstrip()
                if self._may_be(text, self._tags.open):
                    raise NeedMoreText
                if text.startswith(self._tags.open):
                    self._text = text[len(self._tags.open) :]
                self._begun = bool(text)
        else:
            marks = self._form.literals
        at, mark = self._find(marks)
        yield from self._emit(ReasoningPart, at)
        if not mark:
            self._wait()
            return
        self._thinks, self._begun, self._space, self._may_think = False, False, "", False
        self._skips = not self._form.has_channels
        if mark not in self._form.blocks:
            self._text = self._text[len(mark) :]

    def _emit_parts(self) -> Iterator[Part]:
        """Yield text and calls, up to the reasoning."""
        if not self._begun:
            text = self._text.lstrip()
            if self._skips:
                self._text = self._text.lstrip("\n")
            if not text:
                if not self._ended:
                    raise NeedMoreText
                yield from self._emit(TextPart, len(self._text))
                return
            if self._may_think and self._tags is not None:
                if self._may_be(text, self._tags.open):
                    raise NeedMoreText
                if text.startswith(self._tags.open):
                    self._text, self._thinks, self._begun = text[len(self._tags.open) :], True, True
                    return
            calls = self._read_whole_text(text)
            if calls is not None:
                self._text = ""
                yield from self._calls(calls)
                return
        self._begun = True
        at, mark = self._find(self._form.literals)
        yield from self._emit(TextPart, at)
        if not mark:
            self._wait()
            return
        if mark in self._form.dropped:
            self._text = self._text[len(mark) :]
            return
        scan = Scan(self._text, len(mark), ended=self._ended)
        try:
            result = self._form.blocks[mark](scan, self._tools)
        except NotACall:
            yield from self._emit(TextPart, len(mark))
            return
        self._text = self._text[scan.at :]
        if isinstance(result, str):
            self._thinks = result == "thoughts"
            kind = ReasoningPart if self._thinks else TextPart
            self._space = "\n\n" if self._has_emitted[kind] else ""
            return
        yield from self._calls(result)

    def _read_whole_text(self, text: str) -> list[ToolCall] | Channel | None:
        """Return the calls of a text that has nothing else; None for other texts."""
        for begin, reader in self._form.begins:
            if text.startswith(begin):
                scan = Scan(text, 0, ended=self._ended)
                try:
                    calls = reader(scan, self._tools)
                    scan.space()
                    if not scan.is_over():
                        raise NotACall("text after the calls")
                except NotACall:
                    continue
                return calls
        return None

    def _calls(self, calls: list[ToolCall] | Channel) -> Iterator[ToolCall]:
        assert isinstance(calls, list)
        self._after_call = True
        yield from calls

    def _wait(self) -> None:
        """Wait for further text if the start of a mark is held back."""
        if self._text:
            raise NeedMoreText

    def _find(self, marks: tuple[str, ...]) -> tuple[int, str]:
        """Return where the text surely without marks ends, and the complete mark there, if any."""
        matches = [(at, -len(mark), mark) for mark in marks if (at := self._text.find(mark)) >= 0]
        at, _, mark = min(matches, default=(len(self._text), 0, ""))
        if not self._ended and any(self._is_longer(other, mark, at) for other in marks):
            return at, ""
        if mark or self._ended:
            return at, mark
        max_length = min(max(map(len, marks), default=1) - 1, len(self._text))
        for num in range(max_length, 0, -1):
            if any(other.startswith(self._text[-num:]) for other in marks):
                return len(self._text) - num, ""
        return at, ""

    def _is_longer(self, other: str, mark: str, at: int) -> bool:
        """Whether the text, which ends with a mark, may still become a longer mark."""
        return bool(mark) and len(other) > len(mark) and other.startswith(self._text[at:])

    def _emit(self, kind: type[TextPart | ReasoningPart], num: int) -> Iterator[Part]:
        """Yield the first characters of the text as a part; hold back space at its end.

        Held-back space is emitted with the next text. In thoughts only line breaks are held back,
        and line breaks before the first thought are dropped.
        """
        piece, self._text = self._text[:num], self._text[num:]
        if kind is ReasoningPart and not self._has_emitted[ReasoningPart]:
            piece = piece.lstrip("\n")
        text = piece.rstrip("\n" if kind is ReasoningPart else None)
        if text:
            yield kind(self._space + text)
            self._space, self._has_emitted[kind] = piece[len(text) :], True
            self._after_call = False
        else:
            self._space += piece

    def _may_be(self, text: str, mark: str) -> bool:
        """Whether a text is a proper prefix of a mark and may still become the mark."""
        return not self._ended and len(text) < len(mark) and mark.startswith(text)
