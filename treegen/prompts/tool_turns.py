"""Replies with tool calls as the model writes them, and results as its chat template shows them."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from treegen.common.bounded.templates import TemplateError, render_chat
from treegen.common.outputs import Completion
from treegen.errors import InputError, arg
from treegen.prompts.reasoning import reasoning_arguments
from treegen.prompts.replies.replies import ReplyReader
from treegen.prompts.replies.types import Reply, ToolCall

_QUESTION: Final = {"role": "user", "content": "Hello."}


class ToolTurns:
    """Reads the tool calls of replies, and renders the tools' results as text to append.

    Attributes:
        tools: The tools, as JSON schemas.
        replies: The reader of replies.
    """

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[Mapping[str, Any]],
        *,
        template: Mapping[str, Any] | None = None,
        tool_format: str | None = None,
    ) -> None:
        """Find out how the model of a tokenizer writes calls.

        Args:
            tokenizer: The model's tokenizer, with its chat template.
            tools: The tools, as JSON schemas.
            template: Further variables of the chat template, such as enable_thinking. Default:
                none.
            tool_format: A name of `TOOL_FORMATS`, which replaces the tokenizer's own format.

        Raises:
            InputError: The tokenizer has no chat template, or `tool_format` names no format.
        """
        if not getattr(tokenizer, "chat_template", None):
            raise InputError(
                "the tokenizer has no chat template, but tool calls require a chat template; load "
                f"the model with {arg('chat_template', 'TEMPLATE')}, or use a chat model, such as "
                "the bundled demo-agent"
            )
        self.tools, self.replies = list(tools), ReplyReader(tokenizer, tool_format)
        self._tokenizer = tokenizer
        self._template = reasoning_arguments(template or {}, tokenizer)

    def read(self, completion: Completion, before: Sequence[int] = ()) -> Reply:
        """Return a completion as a reply.

        Args:
            completion: The completion. One without token ids is read by its text.
            before: The last token ids before it, which may have opened the reasoning. Default:
                none.
        """
        if completion.text and not completion.tokens:
            return self.replies.parse_text(completion.text, self.tools)
        return self.replies.read(completion, before, self.tools)

    def render_results(
        self, calls: Sequence[ToolCall], results: Sequence[str], stop: int | str | None
    ) -> str:
        r"""Return the text from where a reply with calls has stopped to the start of the next one.

        It begins with the text of the token that ended the reply, such as "<|im_end|>". It is the
        part of the rendered chat that the results add, so a chat that is extended with it has the
        text that the template gives the whole chat.

        Args:
            calls: The calls of the reply.
            results: The result of each call that ran, in order; at least one.
            stop: What ended the reply, as in `Completion.stop`.

        Raises:
            InputError: The template does not show the results, or it shows them in a way in which
                the reply does not stay as the model has written it.
        """
        answered = calls[: len(results)]
        ending = self._stop_text(stop)
        start = self._find_start(answered, ending)
        text = self._render(answered, results, is_open=True)
        if not text.startswith(start):
            raise self._error("the rendered text before the results depends on the results")
        return text[len(start) :]

    def render_message(self, text: str) -> str:
        """Return a message of the user, to append where a reply of the assistant would start.

        It ends where the next reply starts. The assistant's turn before it is empty.

        Args:
            text: The message.

        Raises:
            InputError: The template shows an empty reply differently.
        """
        start = self._chat([_QUESTION], is_open=True)
        empty = {"role": "assistant", "content": ""}
        rendered = self._chat([_QUESTION, empty, {"role": "user", "content": text}], is_open=True)
        if not rendered.startswith(start):
            raise self._error("the template renders the start of an empty reply differently")
        return rendered[len(start) :]

    def render_question(self, text: str) -> str:
        """Return a chat of one message without tools, up to where its answer starts."""
        message = {"role": "user", "content": text}
        return render_chat(
            self._tokenizer, [message], **{**self._template, "add_generation_prompt": True}
        )

    def _find_start(self, calls: Sequence[ToolCall], ending: str) -> str:
        """Return the rendered chat up to where a reply with calls stops."""
        marker = secrets.token_hex(16)
        rendered = self._render(calls, [marker] * len(calls), is_open=True)
        marker_start = rendered.find(marker)
        if marker_start < 0:
            raise self._error("the template does not render the results")
        without = self._render(calls, (), is_open=False)
        at = rendered.rfind(ending, 0, marker_start) if ending else -1
        if at < 0 or at < len(self._chat([_QUESTION], is_open=False)):
            # The template does not write the token with which the model has stopped.
            at = len(without) - len(self._reply_end())
            if not without.endswith(self._reply_end()):
                raise self._error(
                    "the template ends a reply with tool calls differently from a reply without "
                    "tool calls"
                )
        if rendered[:at] != without[:at]:
            raise self._error("the template renders a reply differently when results follow")
        return rendered[:at]

    def _stop_text(self, stop: int | str | None) -> str:
        if isinstance(stop, str):
            raise InputError(
                f"a reply with tool calls ended at the stop string {stop!r:.40}; remove the "
                "argument stop, so that the model ends each reply"
            )
        token = self._tokenizer.eos_token_id if stop is None or stop < 0 else stop
        return "" if token is None else str(self._tokenizer.convert_ids_to_tokens(int(token)) or "")

    def _reply_end(self) -> str:
        """Return the text that the template writes at the end of a reply without calls."""
        word = secrets.token_hex(16)
        text = self._chat([_QUESTION, {"role": "assistant", "content": word}], is_open=False)
        _, separator, end = text.rpartition(word)
        if not separator:
            raise self._error("the template does not render replies")
        return end

    def _render(self, calls: Sequence[ToolCall], results: Sequence[str], *, is_open: bool) -> str:
        """Return the text of a chat whose reply has calls, with their results if there are any.

        Args:
            calls: The calls.
            results: The results of the first calls.
            is_open: Whether the assistant continues.
        """
        for as_text in (False, True):  # some templates take arguments as text only
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [_as_message(call, as_text=as_text) for call in calls],
            }
            answers = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": result}
                for call, result in zip(calls, results, strict=False)
            ]
            try:
                return self._chat([_QUESTION, message, *answers], is_open=is_open)
            except InputError:
                if as_text:
                    raise
        raise AssertionError

    def _chat(self, messages: Sequence[Mapping[str, Any]], *, is_open: bool) -> str:
        more = {"tools": self.tools} if self.tools else {}
        try:
            return render_chat(
                self._tokenizer,
                messages,
                **{**self._template, **more, "add_generation_prompt": is_open},
            )
        except (TemplateError, TypeError) as error:
            raise self._error(str(error)) from error

    def _error(self, reason: str) -> InputError:
        return InputError(
            f"the chat template cannot continue a chat with tool results: {reason}; load the model "
            f"with {arg('chat_template', 'TEMPLATE')} and a template that supports tool results"
        )


def _as_message(call: ToolCall, *, as_text: bool) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False) if as_text else call.arguments
    return {
        "type": "function",
        "id": call.id,
        "function": {"name": call.name, "arguments": arguments},
    }
