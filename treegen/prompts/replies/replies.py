"""A completion, or a sample while it grows, as what the model has said."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Final

from treegen.common.outputs import Completion
from treegen.errors import InputError, ModelWarning
from treegen.prompts.detokenize import Detokenizer, special_tokens
from treegen.prompts.replies.arguments import ToolSchemas
from treegen.prompts.replies.call_grammars import call_grammar
from treegen.prompts.replies.formats import (
    NO_TOOLS,
    USUAL,
    template_text,
    tool_format,
    tool_format_of,
)
from treegen.prompts.replies.parser import ReplyParser
from treegen.prompts.replies.readers import make_call
from treegen.prompts.replies.scan import NotACall
from treegen.prompts.replies.types import Part, ReasoningPart, Reply, TextPart, ToolCall
from treegen.prompts.thinking import KNOWN, ThinkingTags, tags_of, without_tags
from treegen.prompts.token_text import TokenText
from treegen.prompts.tokens import TAIL

_THOUGHTS: Final = ("reasoning_content", "thinking", "reasoning", "thoughts")


class ReplyReader:
    """Takes apart what one model says: thoughts, text and tool calls.

    A tokenizer with a `response_template` says how its model writes. For others the format of calls
    is found by the chat template; see `TOOL_FORMATS`.

    format: how the model writes calls; None if that is not known. text: the text of its tokens,
    with the special tokens that are marks.
    """

    def __init__(self, tokenizer: Any, tool_format_name: str | None = None) -> None:
        """What a model with a tokenizer says.

        Args:
            tool_format_name: A name of `TOOL_FORMATS`, in place of what the tokenizer says.

        Raises:
            InputError: it is no tokenizer, or no format has the name.
        """
        if not callable(getattr(tokenizer, "convert_tokens_to_ids", None)):
            raise InputError(f"tokenizer must be one of transformers, got {tokenizer!r:.60}")
        self.tokenizer = tokenizer
        given = None if tool_format_name is None else tool_format(tool_format_name)
        self.format = given or tool_format_of(tokenizer)
        self.by_template = (
            given is None and getattr(tokenizer, "response_template", None) is not None
        )
        tags = tags_of(tokenizer) or KNOWN[0]
        self._tags, self._thinking = tags, ThinkingTags(tags, tokenizer)
        form = self.format or USUAL
        marks = (*form.literals, *form.inner, tags.open, tags.close)
        special = special_tokens(tokenizer, Detokenizer(tokenizer))
        shown = [name for name in special if any(name in mark for mark in marks)]
        self.text = TokenText(tokenizer, shown=shown)
        ends = [name for name in shown if name in form.dropped]
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
        """Take a completion apart. Calls are found if there are tools.

        Thoughts are the completion's `thinking` if that is known. Else they stand between the tags
        that the tokenizer is known by, or <think> and </think>, and before a closing tag.

        Args:
            prompt: The token ids before it; they may have opened the thinking.
            tools: As the chat template had them.
            is_structured: Whether the text has a grammar, so that tags in it are no thinking where
                the completion has none.
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
            rest = self._decode_completion(completion, before, thinking.num_tokens).lstrip("\n")
            parts = ReplyParser(*self._get_format(tools)).end(rest)
            thoughts = without_tags(completion.text[: thinking.end], self.tokenizer)
            reply = _reply(parts)
            text = reply.text if reply.calls else completion.answer
            return Reply(text, reply.calls, thoughts)
        shown = self._decode_completion(completion, prompt)
        opened = self._thinking.opens(prompt) if len(prompt) else False
        if not opened and not has_channels and not shown.lstrip().startswith(self._tags.open):
            opened = self._tags.close in shown
        reply = _reply(self._parser(opened, tools).end(shown))
        if not reply.calls and not reply.thoughts and not has_channels and not opened:
            return Reply(completion.text, [])
        return reply

    def call_grammar(
        self, tools: Sequence[Any], name: str | None = None, *, is_single: bool = False
    ) -> str:
        """The grammar of a reply that calls tools, for `SamplingParams.grammar`.

        A model that thinks does so before. Where the format of calls is not known, it is `hermes`.

        Args:
            tools: As the chat template has them.
            name: The tool to call; None for any.
            is_single: Whether there is to be one call only.

        Raises:
            InputError: calls in the model's format cannot be forced, or there is no such tool.
        """
        if self.format is None and self.by_template:
            raise InputError(
                "a reply cannot be made to call a tool where only the tokenizer's "
                "response_template tells how; name the format: --tool-format, tool_format="
            )
        return call_grammar(self.tokenizer, self.format, tools, name=name, is_single=is_single)

    def start_stream(self, prompt: Sequence[int], tools: Sequence[Any] | None) -> StreamingReply:
        """A sample of a prompt as it grows.

        Its parts are those of `read`, with one exception: what stands before a closing tag that no
        opening tag came before is text, because it was told before the tag came.
        """
        self._warn(tools)
        parser = self._parser(self._thinking.opens(prompt), tools)
        return StreamingReply(self, parser, prompt, tools)

    def _warn(self, tools: Sequence[Any] | None) -> None:
        if self._is_warned or not tools:
            return
        self._is_warned = True
        told = "its chat template shows no tools to the model"
        if "tools" in template_text(self.tokenizer):
            told = "its chat template does not tell the format"
        warnings.warn(
            f"how this model writes tool calls is not known: {told}. Only JSON is taken for a "
            "call; name the format: --tool-format, tool_format=",
            ModelWarning,
            stacklevel=3,
        )

    def _get_format(self, tools: Sequence[Any] | None) -> tuple[Any, ToolSchemas]:
        form = self.format or USUAL
        return form if tools or form.has_channels else NO_TOOLS, ToolSchemas(tools)

    def _parser(self, is_thinking: bool, tools: Sequence[Any] | None) -> ReplyParser:
        return ReplyParser(*self._get_format(tools), self._tags, is_thinking=is_thinking)

    def _decode_completion(
        self, completion: Completion, before: Sequence[int], start: int = 0
    ) -> str:
        """The text of a completion from a token on, with marks and without what stopped it.

        A mark that stopped it stays: it tells an ended call from one that was cut short.
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
        """Take a completion apart as its tokenizer says; None if it is not written that way."""
        written = self.tokenizer.decode(completion.tokens)
        if isinstance(completion.stop, str):
            written = written.rpartition(completion.stop)[0]
        try:
            found = self.tokenizer.parse_response(
                written, prefix=self.tokenizer.decode(list(prompt)), tools=tools
            )
            functions = [each["function"] for each in found.get("tool_calls") or ()]
            calls = [make_call(each["name"], each["arguments"]) for each in functions]
        except (ValueError, TypeError, KeyError, NotACall):
            return None
        thoughts = next((found[name] for name in _THOUGHTS if found.get(name)), "")
        text = str(found.get("content") or "").removesuffix(self.tokenizer.eos_token or "")
        return Reply(text, calls, thoughts)


class StreamingReply:
    """One sample while it grows: its parts as they are known."""

    def __init__(
        self,
        replies: ReplyReader,
        parser: ReplyParser,
        prompt: Sequence[int],
        tools: Sequence[Any] | None,
    ) -> None:
        """Made by `ReplyReader.growing`."""
        self._replies, self._parser = replies, parser
        self._prompt, self._tools = prompt, tools

    @property
    def waits(self) -> bool:
        """Whether nothing is told before the end."""
        return self._replies.by_template

    def add(self, piece: str) -> list[Part]:
        """The parts that are known after a piece of text, which has marks."""
        return [] if self.waits else self._parser.add(piece)

    def decode_completion(self, completion: Completion) -> str:
        """The whole text, with marks, of the sample that has ended."""
        return self._replies._decode_completion(completion, self._prompt)

    def end(self, piece: str, completion: Completion) -> list[Part]:
        """The rest of the parts. piece: the last text."""
        if not self.waits:
            return self._parser.end(piece)
        reply = self._replies.read(completion, self._prompt, self._tools)
        thoughts = [ReasoningPart(reply.thoughts)] if reply.thoughts else []
        return [*thoughts, *([TextPart(reply.text)] if reply.text else []), *reply.calls]


def _reply(parts: Iterable[Part]) -> Reply:
    parts = list(parts)
    return Reply(
        "".join(part.text for part in parts if isinstance(part, TextPart)),
        [part for part in parts if isinstance(part, ToolCall)],
        "".join(part.text for part in parts if isinstance(part, ReasoningPart)),
    )
