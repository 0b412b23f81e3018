"""Converts completions to Inspect's outputs."""

from collections.abc import Sequence
from typing import Any, Final

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessageAssistant,
    ContentReasoning,
    ContentText,
    Logprobs,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall

from treegen.common.outputs import Completion, Score
from treegen.prompts.replies import ReplyReader
from treegen.prompts.token_text import TokenText, chat_logprobs

_REASONS: Final[dict[str, StopReason]] = {"length": "max_tokens", "error": "unknown"}


def output_of(
    model: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    replies: ReplyReader,
    *,
    text: TokenText,
    tools: Sequence[Any] | None,
    logprobs: bool,
    seconds: float,
) -> ModelOutput:
    """Return the output of one generation: one choice per completion.

    Args:
        model: Name of the model.
        prompt: Token ids of the prompt.
        completions: The completions.
        replies: Splits completions into reasoning, text and tool calls.
        text: Decodes tokens.
        tools: Tools that the chat template was given.
        logprobs: Whether to report log-probabilities.
        seconds: Duration of the generation.
    """
    read, drawn = len(prompt), sum(each.num_tokens for each in completions)
    choices = []
    for each in completions:
        message = _message(model, prompt, each, replies, tools)
        reason = _REASONS.get(each.finish_reason, "stop")
        choices.append(
            ChatCompletionChoice(
                message=message,
                stop_reason="tool_calls" if message.tool_calls else reason,
                logprobs=_logprobs(prompt, each, text) if logprobs else None,
                prompt_logprobs=_prompt_logprobs(prompt, each.prompt_logprobs, text),
            )
        )
    usage = ModelUsage(input_tokens=read, output_tokens=drawn, total_tokens=read + drawn)
    return ModelOutput(model=model, choices=choices, usage=usage, time=seconds)


def _message(
    model: str,
    prompt: Sequence[int],
    completion: Completion,
    replies: ReplyReader,
    tools: Sequence[Any] | None,
) -> ChatMessageAssistant:
    reply = replies.read(completion, prompt, tools)
    content: str | list[Any] = reply.text
    if reply.thoughts:
        content = [ContentReasoning(reasoning=reply.thoughts), ContentText(text=reply.text)]
    calls = [
        ToolCall(id=call.id, function=call.name, arguments=call.arguments) for call in reply.calls
    ]
    return ChatMessageAssistant(
        content=content, tool_calls=calls or None, model=model, source="generate"
    )


def _logprobs(prompt: Sequence[int], completion: Completion, text: TokenText) -> Logprobs:
    tokens = text.iter_named_tokens(
        prompt, completion.tokens, completion.logprobs, completion.top_logprobs
    )
    return Logprobs.model_validate({"content": chat_logprobs(tokens)})


def _prompt_logprobs(
    prompt: Sequence[int], score: Score | None, text: TokenText
) -> Logprobs | None:
    """Return the log-probabilities of the prompt's tokens except the first."""
    if score is None:
        return None
    tops = score.top.pairs() if score.top is not None else ()
    tokens = text.iter_named_tokens(prompt[:1], score.tokens, score.logprobs, tops)
    return Logprobs.model_validate({"content": chat_logprobs(tokens)})
