"""Completions as the JSON of OpenAI's protocol, whole or a piece at a time."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from treegen.outputs import Completion, Score
from treegen.prompts.calls import read_reply
from treegen.prompts.detokenize import CONTEXT_TOKENS, PARTIAL
from treegen.prompts.token_text import Text
from treegen.prompts.tokens import TAIL
from treegen.serve.asks import Ask


class Drawn(Protocol):
    """Tokens of a sample with what is recorded of each: a Completion, or News."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def logprobs(self) -> tuple[float, ...]: ...


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


@dataclass(slots=True)
class Answer:
    """The answer to one request.

    prompts: token ids of each prompt. growing: texts that are streamed, by choice.
    """

    ask: Ask
    model: str
    text: Text
    prompts: list[list[int]] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))
    growing: dict[int, Growing] = field(default_factory=dict)
    num_drawn: int = 0

    def choice_of(self, place: int, sample: int) -> int:
        """The number of a choice: samples of the first prompt come first."""
        return place * self.ask.params.n + sample

    def whole(self, found: Sequence[Sequence[Completion]], scores: Sequence[Score | None]) -> Any:
        """The JSON of an answer that is given at once.

        found: the completions of each prompt; none where nothing was to be drawn.
        scores: the score of each prompt, for echo with logprobs.
        """
        choices = []
        for place, prompt in enumerate(self.prompts):
            score = scores[place] if scores else None
            if not self.ask.draws:
                choices.append(self._choice(place, prompt, None, score))
            for each in found[place] if found else ():
                self.num_drawn += each.num_tokens
                choices.append(
                    self._choice(self.choice_of(place, each.sample_index), prompt, each, score)
                )
        return self._frame(choices, "chat.completion" if self.ask.is_chat else "text_completion",
                           usage=self.usage())  # fmt: skip

    def _choice(
        self, index: int, prompt: Sequence[int], drawn: Completion | None, score: Score | None
    ) -> dict[str, Any]:
        text, reason = (drawn.text, drawn.finish_reason) if drawn else ("", "length")
        if self.ask.is_chat:
            assert drawn is not None
            message = self._message(prompt, drawn)
            logprobs = self._chat_logprobs(prompt, drawn) if self.ask.logprobs else None
            calls = "tool_calls" in message
            return {"index": index, "message": message, "logprobs": logprobs,
                    "finish_reason": "tool_calls" if calls else reason}  # fmt: skip
        before = self.text.of([], prompt) if self.ask.echo else ""
        listed = None
        if self.ask.logprobs:
            listed = self._logprobs(prompt, drawn, offset=len(before)) if drawn else _no_logprobs()
            if self.ask.echo:
                listed = _joined(self._prompt_logprobs(prompt, score), listed)
        return {"index": index, "text": before + text, "logprobs": listed, "finish_reason": reason}

    def _message(self, prompt: Sequence[int], drawn: Completion) -> dict[str, Any]:
        ask = self.ask
        message: dict[str, Any] = {"role": "assistant", "content": drawn.text}
        if ask.separates and drawn.thinking is not None:
            message["content"] = drawn.answer
            message["reasoning_content"] = self.text.thinking(drawn.text[: drawn.thinking.end])
        if not ask.tools:
            return message
        reply = read_reply(drawn, prompt, self.text.tokenizer, ask.tools)
        message["content"] = reply.text
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [
                {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "index": place,
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for place, call in enumerate(reply.calls)
            ]  # fmt: skip
        return message

    # Streams

    def first_pieces(self) -> list[Any]:
        """What a stream begins with once the prompts' token ids are known."""
        pieces = []
        for place, prompt in enumerate(self.prompts):
            for sample in range(self.ask.params.n):
                index, tail = self.choice_of(place, sample), list(prompt[-TAIL:])
                self.growing[index] = Growing(self.text, self.ask.params.stops, tail, len(tail))
                if self.ask.is_chat:
                    pieces.append(self._piece(index, {"role": "assistant", "content": ""}))
                elif self.ask.echo:
                    pieces.append(self._piece(index, self.text.of([], prompt)))
        return pieces

    def piece(self, index: int, drawn: Drawn) -> Any | None:
        """What a stream says of further tokens of a choice; None if nothing yet."""
        growing = self.growing[index]
        before = growing.tokens[-CONTEXT_TOKENS:]
        text = growing.add(drawn.tokens)
        if self.ask.tools:
            return None
        logprobs = self._piece_logprobs(before, drawn, offset=len(growing.sent) - len(text))
        return self._piece(index, text, logprobs=logprobs) if text or logprobs else None

    def last_piece(self, index: int, drawn: Completion, num_told: int) -> Any:
        """What a stream says last of a choice. num_told: tokens that pieces were about."""
        growing = self.growing[index]
        self.num_drawn += drawn.num_tokens
        text, reason = growing.end(drawn.text), str(drawn.finish_reason)
        rest = _Rest(
            drawn.tokens[num_told:], drawn.logprobs[num_told:], drawn.top_logprobs[num_told:]
        )
        logprobs = self._piece_logprobs(growing.tokens, rest, offset=len(growing.sent) - len(text))
        delta: Any = text
        if self.ask.tools:
            delta = self._message(self.prompts[index // self.ask.params.n], drawn)
            reason = "tool_calls" if "tool_calls" in delta else reason
        return self._piece(index, delta, reason=reason, logprobs=logprobs)

    def usage_piece(self) -> Any:
        """The last piece of a stream that is to tell its usage."""
        return self._frame([], self._piece_kind, usage=self.usage())

    @property
    def _piece_kind(self) -> str:
        return "chat.completion.chunk" if self.ask.is_chat else "text_completion"

    def _piece(
        self, index: int, delta: Any, *, reason: str | None = None, logprobs: Any = None
    ) -> Any:
        key = "delta" if self.ask.is_chat else "text"
        if self.ask.is_chat and isinstance(delta, str):
            delta = {"content": delta} if delta else {}
        choice = {"index": index, key: delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if self.ask.with_usage else {}
        return self._frame([choice], self._piece_kind, **usage)

    def _frame(self, choices: list[Any], kind: str, **more: Any) -> Any:
        prefix = "chatcmpl" if self.ask.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created,
                "model": self.model, "choices": choices, **more}  # fmt: skip

    def usage(self) -> dict[str, int]:
        """Tokens of the prompts and of all that was drawn."""
        read = sum(map(len, self.prompts))
        return {"prompt_tokens": read, "completion_tokens": self.num_drawn,
                "total_tokens": read + self.num_drawn}  # fmt: skip

    # Log-probabilities

    def _piece_logprobs(self, before: Sequence[int], drawn: Any, *, offset: int) -> Any:
        if not self.ask.logprobs or not drawn.tokens:
            return None
        if self.ask.is_chat:
            return self._chat_logprobs(before, drawn)
        return self._logprobs(before, drawn, offset=offset)

    def _chat_logprobs(self, before: Sequence[int], drawn: Any) -> dict[str, Any]:
        content = []
        context = list(before[-CONTEXT_TOKENS:])
        tops = _tops(drawn) or [()] * len(drawn.tokens)
        for token, logprob, top in zip(drawn.tokens, drawn.logprobs, tops, strict=True):
            each = self._chat_token(context, token, logprob)
            each["top_logprobs"] = [self._chat_token(context, *pair) for pair in top]
            content.append(each)
            context.append(token)
        return {"content": content, "refusal": None}

    def _chat_token(self, context: list[int], token: int, logprob: float) -> dict[str, Any]:
        text = self.text.token(context, token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}

    def _logprobs(self, before: Sequence[int], drawn: Any, *, offset: int) -> dict[str, Any]:
        found = _no_logprobs()
        context = list(before[-CONTEXT_TOKENS:])
        tops = _tops(drawn)
        for place, token in enumerate(drawn.tokens):
            found["tokens"].append(self.text.token(context, token))
            found["token_logprobs"].append(drawn.logprobs[place])
            pairs = tops[place] if tops else ()
            top = {self.text.token(context, each): value for each, value in pairs}
            found["top_logprobs"].append(top)
            found["text_offset"].append(offset)
            offset += len(self.text.of(context, [token]))
            context.append(token)
        return found

    def _prompt_logprobs(self, prompt: Sequence[int], score: Score | None) -> dict[str, Any]:
        logprobs = (None, *(score.logprobs if score else ()))
        return self._logprobs([], _Rest(tuple(prompt), logprobs, ()), offset=0)


@dataclass(frozen=True, slots=True)
class _Rest:
    tokens: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    top: tuple[tuple[tuple[int, float], ...], ...]


def _tops(drawn: Any) -> Sequence[Sequence[tuple[int, float]]]:
    found: Sequence[Sequence[tuple[int, float]]] = (
        drawn.top_logprobs if isinstance(drawn, Completion) else drawn.top
    )
    return found


def _no_logprobs() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {name: first[name] + second[name] for name in first}
