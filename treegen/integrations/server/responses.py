"""Converts completions to OpenAI's JSON, whole or streamed."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice
from typing import Any, Final

from treegen.common.outputs import Completion, Score
from treegen.integrations.server.requests import CompletionRequest
from treegen.prompts.replies import Part, ReasoningPart, Reply, ReplyReader, TextPart, ToolCall
from treegen.prompts.token_text import CONTEXT_TOKENS, NamedToken, TokenText, chat_logprobs
from treegen.search.live.run import SampleDelta

_NO_COMPLETION: Final = Completion("", 0, 0, "", (), (), "length")


class CompletionResponse:
    """The response to one request. Its choices are samples, in the order of the prompts.

    Attributes:
        prompts: The token ids of each prompt, once they are known.
    """

    def __init__(
        self,
        request: CompletionRequest,
        num: int,
        model: str,
        text: TokenText,
        replies: ReplyReader,
    ) -> None:
        """Create a response without choices.

        Args:
            request: The request.
            num: Samples per prompt.
            model: Name of the model.
            text: Decodes tokens.
            replies: Splits replies into reasoning, text and tool calls.
        """
        self.request, self.prompts = request, list[list[int]]()
        self._num_samples, self._text, self._replies, self._num_completion_tokens = (
            num,
            text,
            replies,
            0,
        )
        kind = "chat.completion" if request.is_chat else "text_completion"
        prefix = "chatcmpl" if request.is_chat else "cmpl"
        self._frame = {
            "id": f"{prefix}-{request.request_id or uuid.uuid4().hex}",
            "object": f"{kind}.chunk" if request.is_chat and request.stream else kind,
            "created": int(time.time()),
            "model": model,
        }
        # By choice of a stream: the last tokens that were sent, and the number of characters sent.
        self._sent: dict[int, tuple[list[int], int]] = {}
        self._num_calls: dict[int, int] = {}

    # Whole responses

    def build_response(
        self, completions: Sequence[Sequence[Completion]], scores: Sequence[Score | None]
    ) -> Any:
        """Return the JSON of a whole response.

        Args:
            completions: The completions of each prompt; empty if nothing was sampled.
            scores: The score of each prompt where it is needed: for echo with logprobs, and for
                prompt_logprobs.
        """
        choices = []
        ids = self.request.return_token_ids
        for prompt_index, prompt in enumerate(self.prompts):
            echoed, prompt_logprobs = "", None
            if self.request.echo:
                echoed = self._text.of([], prompt)
            score = scores[prompt_index] if scores else None
            if self.request.echo and self.request.num_top is not None:
                scored = (None, *(score.logprobs if score else ()))
                tops = ((), *(score.top.pairs() if score and score.top else [()] * len(scored[1:])))
                tops = tuple(top[: self.request.num_top] for top in tops)
                prompt_logprobs = _completion_logprobs(
                    list(self._text.iter_named_tokens([], prompt, scored, tops)), 0
                )
            for completion in completions[prompt_index] if completions else [_NO_COMPLETION]:
                content = (
                    self._message(prompt_index, completion)
                    if self.request.is_chat
                    else echoed + completion.text
                )
                logprobs = self._logprobs(prompt, completion, len(echoed))
                if logprobs and prompt_logprobs:
                    logprobs = {
                        name: prompt_logprobs[name] + logprobs[name] for name in prompt_logprobs
                    }
                choice = self._build_final_choice(prompt_index, completion, content, logprobs)
                if self.request.prompt_logprobs is not None:
                    choice["prompt_logprobs"] = self._prompt_logprobs(prompt, score)
                if ids:
                    choice["token_ids"] = list(completion.tokens)
                    if completion.versions:
                        choice["versions"] = completion.versions
                    if not self.request.is_chat:
                        choice["prompt_token_ids"] = prompt
                choices.append(choice)
        prompt_ids = {"prompt_token_ids": self.prompts[0]} if ids and self.request.is_chat else {}
        return {**self._frame, "choices": choices, "usage": self._usage(), **prompt_ids}

    def _prompt_logprobs(self, prompt: Sequence[int], score: Score | None) -> list[Any]:
        """Return the log-probabilities of a prompt's tokens by token id, as vLLM's server does."""
        num, entries = self.request.prompt_logprobs or 0, list[Any]([None])
        if score is None:
            return entries
        tops = score.top.pairs() if score.top is not None else [()] * len(score.tokens)
        for at, (token, logprob, top) in enumerate(
            zip(score.tokens, score.logprobs, tops, strict=True), 1
        ):
            named: dict[int, tuple[float, int | None]] = {token: (logprob, None)}
            named |= {token: (value, rank) for rank, (token, value) in enumerate(top[:num], 1)}
            entries.append(
                {
                    str(name): {
                        "logprob": value,
                        "rank": rank,
                        "decoded_token": self._text.token(prompt[:at], name),
                    }
                    for name, (value, rank) in named.items()
                }
            )
        return entries

    def _message(self, prompt_index: int, completion: Completion) -> dict[str, Any]:
        request = self.request
        reply = Reply(completion.text, [])
        if request.parses_reply:
            reply = self._replies.read(
                completion,
                self.prompts[prompt_index],
                request.shown_tools,
                is_structured=request.is_structured,
            )
        message: dict[str, Any] = {"role": "assistant", "content": reply.text}
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["content"] = reply.text or None
            message["tool_calls"] = [_call(*numbered) for numbered in enumerate(reply.calls)]
        return message

    # Streamed responses

    def pieces(self, prompt_index: int, item: Any) -> Iterator[Any]:
        """Yield the stream's chunks for an item that `AsyncLLM.stream` yields.

        Args:
            prompt_index: Index of the prompt.
            item: The prompt's token ids, a SampleDelta, or a Completion.
        """
        if isinstance(item, SampleDelta):
            yield from self._build_chunks(prompt_index, item)
        elif isinstance(item, Completion):
            choice = self._build_final_choice(prompt_index, item, "", None)
            if self._num_calls.get(prompt_index * self._num_samples + item.sample_index):
                choice["finish_reason"] = "tool_calls"
            yield self._piece(choice)
        else:
            self.prompts.append(item.tolist())
            for index in range(
                prompt_index * self._num_samples, (prompt_index + 1) * self._num_samples
            ):
                if self.request.is_chat:
                    first_delta = {"role": "assistant", "content": ""}
                    yield self._piece(self._choice(index, first_delta))
                elif self.request.echo:
                    yield self._piece(
                        self._choice(index, self._text.of([], self.prompts[prompt_index]))
                    )

    def _build_chunks(self, prompt_index: int, sample_delta: SampleDelta) -> Iterator[Any]:
        index = prompt_index * self._num_samples + sample_delta.sample
        before, num_sent = self._sent.get(index, (self.prompts[prompt_index], 0))
        logprobs = self._logprobs(before, sample_delta, num_sent) if sample_delta.tokens else None
        after = [*before[-CONTEXT_TOKENS:], *sample_delta.tokens][-CONTEXT_TOKENS:]
        self._sent[index] = after, num_sent + len(sample_delta.text)
        content: list[Any] = [sample_delta.text] if sample_delta.text else []
        if self.request.parses_reply:
            content = [self._delta(index, part) for part in sample_delta.parts]
        if logprobs and not content:
            content = [""]
        for delta in content:
            yield self._piece(self._choice(index, delta, logprobs))
            logprobs = None

    def _delta(self, index: int, part: Part) -> dict[str, Any]:
        """Return the delta of a stream for a part of a choice."""
        match part:
            case TextPart(text):
                return {"content": text}
            case ReasoningPart(text):
                return {"reasoning_content": text}
            case ToolCall():
                num_calls = self._num_calls.get(index, 0)
                self._num_calls[index] = num_calls + 1
                return {"tool_calls": [_call(num_calls, part)]}

    def usage_piece(self) -> Any:
        """Return the last chunk of a stream, which reports the usage."""
        return {**self._frame, "choices": [], "usage": self._usage()}

    def _piece(self, choice: dict[str, Any]) -> Any:
        usage = {"usage": None} if self.request.stream_options.include_usage else {}
        return {**self._frame, "choices": [choice], **usage}

    # Shared by whole and streamed responses

    def _build_final_choice(
        self, prompt_index: int, completion: Completion, content: Any, logprobs: Any
    ) -> dict[str, Any]:
        self._num_completion_tokens += completion.num_tokens
        calls = isinstance(content, dict) and "tool_calls" in content
        reason = "tool_calls" if calls else completion.finish_reason
        return self._choice(
            prompt_index * self._num_samples + completion.sample_index, content, logprobs, reason
        )

    def _choice(
        self, index: int, content: Any, logprobs: Any = None, reason: str | None = None
    ) -> dict[str, Any]:
        key = "text"
        if self.request.is_chat:
            key = "delta" if self.request.stream else "message"
            if isinstance(content, str):
                content = {"content": content} if content else {}
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}

    def _usage(self) -> dict[str, int]:
        num_prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_completion_tokens,
            "total_tokens": num_prompt_tokens + self._num_completion_tokens,
        }

    def _logprobs(
        self, before: Sequence[int], completion: Completion | SampleDelta, offset: int = 0
    ) -> dict[str, Any] | None:
        """Return the log-probabilities of tokens that begin at character `offset` of the choice."""
        if self.request.num_top is None:
            return None
        tops = completion.top if isinstance(completion, SampleDelta) else completion.top_logprobs
        tokens = list(
            self._text.iter_named_tokens(before, completion.tokens, completion.logprobs, tops)
        )
        if not self.request.is_chat:
            return _completion_logprobs(tokens, offset)
        return {"content": chat_logprobs(tokens, self.request.num_top or 0), "refusal": None}


def _call(index: int, call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "index": index, "function": function}


def _completion_logprobs(tokens: Sequence[NamedToken], offset: int) -> dict[str, list[Any]]:
    offsets = accumulate((token.num_characters for token in tokens), initial=offset)
    return {
        "tokens": [token.text for token in tokens],
        "token_logprobs": [token.logprob for token in tokens],
        # The first token of a prompt has no log-probability, because nothing precedes it.
        "top_logprobs": [
            None if token.logprob is None else {other.text: other.logprob for other in token.top}
            for token in tokens
        ],
        "text_offset": list(islice(offsets, len(tokens))),
    }
