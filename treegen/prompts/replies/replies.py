"""A completion, or a sample while it grows, as a reply: thoughts, text and tool calls."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final

from treegen.common.outputs import Completion
from treegen.errors import InputError, ModelWarning, arg
from treegen.prompts.replies.arguments import ToolSchemas
from treegen.prompts.replies.call_grammars import call_grammar
from treegen.prompts.replies.formats import (
    DEFAULT_FORMAT,
    NO_TOOLS,
    tool_format,
    tool_format_of,
)
from treegen.prompts.replies.parser import ReplyParser
from treegen.prompts.replies.readers import make_call
from treegen.prompts.replies.scan import NotACall
from treegen.prompts.replies.types import Part, ReasoningPart, Reply, TextPart, ToolCall
from treegen.prompts.thinking import KNOWN, ThinkingTags, tags_of, template_text, without_tags
from treegen.prompts.token_text import Detokenizer, TokenText, special_tokens
from treegen.prompts.tokens import TAIL

_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning", "thoughts")


class ReplyReader:
    """Splits the completions of one model into thoughts, text and tool calls.

    A tokenizer with a `response_template` describes how its model writes. For others the chat
    template identifies the format of calls; see `TOOL_FORMATS`.

    Attributes:
        format: The format of calls; None if it is not known.
        text: Decodes its tokens, showing the special tokens that are marks.
    """

    def __init__(self, tokenizer: Any, tool_format_name: str | None = None) -> None:
        """Find out how the model of a tokenizer writes replies.

        Args:
            tokenizer: The model's tokenizer.
            tool_format_name: A name of `TOOL_FORMATS`, overriding the tokenizer's format.

        Raises:
            InputError: `tokenizer` is not a tokenizer, or no format has the name.
        """
        if not callable(getattr(tokenizer, "convert_tokens_to_ids", None)):
            raise InputError(f"tokenizer must be a transformers tokenizer, got {tokenizer!r:.60}")
        self.tokenizer = tokenizer
        chosen = None if tool_format_name is None else tool_format(tool_format_name)
        self.format = chosen or tool_format_of(tokenizer)
        has_template = getattr(tokenizer, "response_template", None) is not None
        self.by_template = chosen is None and has_template
        known = tags_of(tokenizer)
        tags = known or KNOWN[0]
        self._tags, self._thinking = tags, ThinkingTags(tags, tokenizer)
        self._knows_tags = known is not None
        form = self.format or DEFAULT_FORMAT
        marks = (*form.literals, *form.inner, tags.open, tags.close)
        special = special_tokens(tokenizer, Detokenizer(tokenizer))
        visible = [name for name in special if any(name in mark for mark in marks)]
        self.text = TokenText(tokenizer, visible=visible)
        ends = [name for name in visible if name in form.dropped]
        self._ends = frozenset(tokenizer.convert_tokens_to_ids(ends))
        self._is_warned = self.format is not None or self.by_template

    def read(
        self,
        completion: Completion,
        prompt: Sequence[int] = (),
        tools: Sequence[Any] | None = None,
        *,
        is_structured: bool = False,
    ) -> Reply:
        """Split a completion into a reply.

        Calls are read only if there are tools, or if the format has channels, as Harmony has.

        Thoughts are the completion's `thinking` if that is known. Otherwise they are the text
        between the tokenizer's known tags, or <think> and </think>, and any text before a closing
        tag.

        Args:
            completion: The completion.
            prompt: The token ids before it, which may have opened the reasoning.
            tools: The tools that the chat template received.
            is_structured: Whether the text has a grammar; tags in it are then not reasoning unless
                the completion has one. Default: False.
        """
        self._warn(tools)
        has_channels = self.format is not None and self.format.has_channels
        if is_structured and completion.thinking is None and not tools and not has_channels:
            return Reply(completion.text, [])
        if self.by_template and (reply := self._by_template(completion, prompt, tools)) is not None:
            return reply
        thinking = completion.thinking
        if thinking is not None and not has_channels:
            before = [*prompt, *completion.tokens[: thinking.num_tokens]]
            answer = self._decode_completion(completion, before, thinking.num_tokens).lstrip("\n")
            parts = ReplyParser(*self._get_format(tools)).end(answer)
            thoughts = without_tags(completion.text[: thinking.end], self.tokenizer)
            reply = _reply(parts)
            text = reply.text if reply.calls else completion.answer
            return Reply(text, reply.calls, thoughts)
        full_text = self._decode_completion(completion, prompt)
        opened = self._thinking.opens(prompt) if len(prompt) else False
        if not opened and not has_channels and not full_text.lstrip().startswith(self._tags.open):
            opened = self._tags.close in full_text
        reply = _reply(self._parser(opened, tools).end(full_text))
        if not reply.calls and not reply.thoughts and not has_channels and not opened:
            return Reply(completion.text, [])
        return reply

    def parse_text(self, text: str, tools: Sequence[Any] | None = None) -> Reply:
        """Split a reply of which only the text is known, with the marks of calls in it.

        Args:
            text: The text.
            tools: The tools that the chat template received.
        """
        self._warn(tools)
        is_opened = self._tags.close in text and not text.lstrip().startswith(self._tags.open)
        return _reply(self._parser(is_opened, tools).end(text))

    def call_grammar(
        self, tools: Sequence[Any], name: str | None = None, *, is_single: bool = False
    ) -> str:
        """Return the grammar of a reply that calls tools, for `SamplingParams.grammar`.

        A thinking model thinks before the grammar applies. An unknown format of calls is taken to
        be `hermes`.

        Args:
            tools: The tools that the chat template receives.
            name: The tool to call; None for any.
            is_single: Whether exactly one call is allowed. Default: False.

        Raises:
            InputError: calls in the model's format cannot be forced, or there is no such tool.
        """
        if self.format is None and self.by_template:
            raise InputError(
                "forced tool calls require a named tool-call format, but only the tokenizer's "
                "response_template defines the format; set the format with --tool-format, or with "
                f"{arg('tool_format=')}"
            )
        return call_grammar(self.tokenizer, self.format, tools, name=name, is_single=is_single)

    def start_stream(
        self,
        prompt: Sequence[int],
        tools: Sequence[Any] | None,
        *,
        is_structured: bool = False,
    ) -> StreamingReply:
        """Return the reply to a prompt as a stream that grows.

        Its parts are those of `read`, with one exception: text before a closing tag without an
        opening tag is text, because it was emitted before the tag arrived.

        Args:
            prompt: As for `read`.
            tools: As for `read`.
            is_structured: As for `read`. Default: False.
        """
        self._warn(tools)
        parser = self._parser(self._thinking.opens(prompt), tools)
        has_channels = self.format is not None and self.format.has_channels
        if is_structured and not self._knows_tags and not tools and not has_channels:
            parser = ReplyParser(*self._get_format(tools))  # tags belong to the structure
        return StreamingReply(self, parser, prompt, tools, is_structured=is_structured)

    def _warn(self, tools: Sequence[Any] | None) -> None:
        if self._is_warned or not tools:
            return
        self._is_warned = True
        reason = "the chat template does not render tools"
        if "tools" in template_text(self.tokenizer):
            reason = "the chat template does not contain a known format"
        warnings.warn(
            f"cannot determine this model's tool-call format: {reason}. Only JSON calls are "
            "parsed; to set the format, use --tool-format or tool_format=",
            ModelWarning,
            stacklevel=3,
        )

    def _get_format(self, tools: Sequence[Any] | None) -> tuple[Any, ToolSchemas]:
        form = self.format or DEFAULT_FORMAT
        return form if tools or form.has_channels else NO_TOOLS, ToolSchemas(tools)

    def _parser(self, is_thinking: bool, tools: Sequence[Any] | None) -> ReplyParser:
        return ReplyParser(*self._get_format(tools), self._tags, is_thinking=is_thinking)

    def _decode_completion(
        self, completion: Completion, before: Sequence[int], start: int = 0
    ) -> str:
        """Return the text of a completion from a token on, with marks and without its stop.

        A mark that stopped it stays, because it distinguishes a finished call from one that was
        cut.
        """
        tokens, stop = completion.tokens[start:], completion.stop
        tail = list(before[-TAIL:])
        if isinstance(stop, int) and tokens[-1:] == (stop,) and stop not in self._ends:
            tokens = tokens[:-1]
        text = self.text.of(tail, tokens)
        if isinstance(stop, str):
            last = len(self.text.of(tail, tokens[:-1]))
            at = text.find(stop, max(last - len(stop) + 1, 0))
            text = text[:at] if at >= 0 else text
        return text

    def _by_template(
        self, completion: Completion, prompt: Sequence[int], tools: Sequence[Any] | None
    ) -> Reply | None:
        """Split a completion by its tokenizer's `response_template`; None if it does not match."""
        written = self.tokenizer.decode(completion.tokens)
        if isinstance(completion.stop, str):
            written = written.rpartition(completion.stop)[0]
        try:
            message = self.tokenizer.parse_response(
                written, prefix=self.tokenizer.decode(list(prompt)), tools=tools
            )
            functions = [entry["function"] for entry in message.get("tool_calls") or ()]
            calls = [make_call(entry["name"], entry["arguments"]) for entry in functions]
        except (ValueError, TypeError, KeyError, NotACall):
            return None
        thoughts = next((message[name] for name in _THOUGHTS if message.get(name)), "")
        text = str(message.get("content") or "").removesuffix(self.tokenizer.eos_token or "")
        return Reply(text, calls, thoughts)


class StreamingReply:
    """One sample while it grows: its parts as soon as they are known."""

    def __init__(
        self,
        replies: ReplyReader,
        parser: ReplyParser,
        prompt: Sequence[int],
        tools: Sequence[Any] | None,
        *,
        is_structured: bool,
    ) -> None:
        """Use `ReplyReader.start_stream` instead.

        Args:
            replies: The reader of the model's replies.
            parser: The parser of the growing text.
            prompt: The token ids of the prompt.
            tools: The tools that the chat template received.
            is_structured: Whether the text has a grammar.
        """
        self._replies, self._parser = replies, parser
        self._prompt, self._tools, self._is_structured = prompt, tools, is_structured

    @property
    def is_buffered(self) -> bool:
        """Whether parts are emitted only at the end, as with a response template."""
        return self._replies.by_template

    def add(self, piece: str) -> list[Part]:
        """Return the parts that a further piece of text, with marks, completes."""
        return [] if self.is_buffered else self._parser.add(piece)

    def decode_completion(self, completion: Completion) -> str:
        """Return the whole text of the finished sample, with marks."""
        return self._replies._decode_completion(completion, self._prompt)

    def end(self, piece: str, completion: Completion) -> list[Part]:
        """Return the remaining parts.

        Args:
            piece: The last piece of text.
            completion: The finished sample.
        """
        if not self.is_buffered:
            return self._parser.end(piece)
        reply = self._replies.read(
            completion, self._prompt, self._tools, is_structured=self._is_structured
        )
        thoughts = [ReasoningPart(reply.thoughts)] if reply.thoughts else []
        return [*thoughts, *([TextPart(reply.text)] if reply.text else []), *reply.calls]


def _reply(parts: Iterable[Part]) -> Reply:
    parts = list(parts)
    return Reply(
        "".join(part.text for part in parts if isinstance(part, TextPart)),
        [part for part in parts if isinstance(part, ToolCall)],
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
    )
