"""Completions as the JSON of OpenAI's protocol, whole or a piece at a time."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Final

from treegen.outputs import Completion, Score
from treegen.prompts.calls import read_reply
from treegen.prompts.detokenize import CONTEXT_TOKENS
from treegen.prompts.token_text import NamedToken, Text, chat_logprobs
from treegen.search.live.run import News
from treegen.serve.asks import Ask

_NOTHING: Final = Completion("", 0, 0, "", (), (), "length")


class Answer:
    """The answer to one request. Its choices are samples: those of the first prompt come first.

    prompts: the token ids of each prompt, once they are known.
    """

    def __init__(self, ask: Ask, num: int, model: str, text: Text) -> None:
        """An answer without choices yet.

        num: samples of each prompt. model: its name. text: of tokens.
        """
        self.ask, self.prompts = ask, list[list[int]]()
        self._num, self._text, self._num_drawn = num, text, 0
        kind = "chat.completion" if ask.is_chat else "text_completion"
        self._frame = {
            "id": f"{'chatcmpl' if ask.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if ask.is_chat and ask.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        # Of a choice in a stream: the last tokens that were told, and how many characters.
        self._told: dict[int, tuple[list[int], int]] = {}

    # Whole

    def whole(self, found: Sequence[Sequence[Completion]], scores: Sequence[Score | None]) -> Any:
        """The JSON of an answer that is given at once.

        found: the completions of each prompt; none where nothing was to be drawn.
        scores: the score of each prompt, for echo with logprobs.
        """
        choices = []
        ids = self.ask.return_token_ids
        for place, prompt in enumerate(self.prompts):
            echoed, its_own = "", None
            if self.ask.echo:
                echoed = self._text.of([], prompt)
            if scores:
                score = scores[place]
                known = (None, *(score.logprobs if score else ()))
                best = [[each] for each in score.best] if score and self.ask.num_top else []
                tops = [[], *best] if best else ()
                its_own = _by_name(list(self._text.named([], prompt, known, tops)), 0)
            for drawn in found[place] if found else [_NOTHING]:
                said = self._message(place, drawn) if self.ask.is_chat else echoed + drawn.text
                logprobs = self._logprobs(prompt, drawn, len(echoed))
                if logprobs and its_own:
                    logprobs = {name: its_own[name] + logprobs[name] for name in its_own}
                choice = self._ended(place, drawn, said, logprobs)
                if ids:
                    choice["token_ids"] = list(drawn.tokens)
                    if not self.ask.is_chat:
                        choice["prompt_token_ids"] = prompt
                choices.append(choice)
        known_prompt = {"prompt_token_ids": self.prompts[0]} if ids and self.ask.is_chat else {}
        return {**self._frame, "choices": choices, "usage": self._usage(), **known_prompt}

    def _message(self, place: int, drawn: Completion) -> dict[str, Any]:
        ask = self.ask
        message: dict[str, Any] = {"role": "assistant", "content": drawn.text}
        if not ask.shown_tools and not ask.separate_reasoning:
            return message
        reply = read_reply(drawn, self.prompts[place], self._text.tokenizer, ask.shown_tools)
        message["content"] = reply.text
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "index": index,
                 "function": {"name": call.name, "arguments": json.dumps(call.arguments)}}
                for index, call in enumerate(reply.calls)
            ]  # fmt: skip
        return message

    # Streams

    def pieces(self, place: int, item: Any) -> Iterator[Any]:
        """What a stream says of an item that `AsyncLLM.stream` gives.

        With tools it says nothing of a sample before its end.
        """
        if isinstance(item, News):
            if not self.ask.shown_tools:
                yield from self._further(place, item)
        elif isinstance(item, Completion):
            whole = self.ask.shown_tools is not None
            logprobs = self._logprobs(self.prompts[place], item) if whole else None
            said = self._message(place, item) if whole else ""
            yield self._piece(self._ended(place, item, said, logprobs))
        else:
            self.prompts.append(item.tolist())
            for index in range(place * self._num, (place + 1) * self._num):
                if self.ask.is_chat:
                    begun = {"role": "assistant", "content": ""}
                    yield self._piece(self._choice(index, begun))
                elif self.ask.echo:
                    yield self._piece(self._choice(index, self._text.of([], self.prompts[place])))

    def _further(self, place: int, news: News) -> Iterator[Any]:
        index = place * self._num + news.sample
        before, given = self._told.get(index, (self.prompts[place], 0))
        logprobs = self._logprobs(before, news, given) if news.tokens else None
        after = [*before[-CONTEXT_TOKENS:], *news.tokens][-CONTEXT_TOKENS:]
        self._told[index] = after, given + len(news.text)
        if news.text or logprobs:
            yield self._piece(self._choice(index, news.text, logprobs))

    def usage_piece(self) -> Any:
        """The last piece of a stream that is to tell its usage."""
        return {**self._frame, "choices": [], "usage": self._usage()}

    def _piece(self, choice: dict[str, Any]) -> Any:
        usage = {"usage": None} if self.ask.stream_options.include_usage else {}
        return {**self._frame, "choices": [choice], **usage}

    # Both

    def _ended(self, place: int, drawn: Completion, said: Any, logprobs: Any) -> dict[str, Any]:
        self._num_drawn += drawn.num_tokens
        calls = isinstance(said, dict) and "tool_calls" in said
        reason = "tool_calls" if calls else drawn.finish_reason
        return self._choice(place * self._num + drawn.sample_index, said, logprobs, reason)

    def _choice(
        self, index: int, said: Any, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        key = "text"
        if self.ask.is_chat:
            key = "delta" if self.ask.stream else "message"
            if isinstance(said, str):
                said = {"content": said} if said else {}
        return {"index": index, key: said, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        read = sum(map(len, self.prompts))
        return {"prompt_tokens": read, "completion_tokens": self._num_drawn,
                "total_tokens": read + self._num_drawn}  # fmt: skip

    def _logprobs(
        self, before: Sequence[int], drawn: Completion | News, offset: int = 0
    ) -> dict[str, Any] | None:
        """What is known of tokens. offset: characters of the choice before them."""
        if self.ask.num_top is None:
            return None
        tops = drawn.top if isinstance(drawn, News) else drawn.top_logprobs
        tokens = list(self._text.named(before, drawn.tokens, drawn.logprobs, tops))
        if not self.ask.is_chat:
            return _by_name(tokens, offset)
        return {"content": chat_logprobs(tokens), "refusal": None}


def _by_name(tokens: Sequence[NamedToken], offset: int) -> dict[str, list[Any]]:
    offsets = accumulate((each.num_characters for each in tokens), initial=offset)
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": [dict(each.top) for each in tokens],
        "text_offset": list(islice(offsets, len(tokens))),
    }
