"""Converts Inspect's messages, tools and settings for treegen, and completions for Inspect.

Settings that treegen cannot honour are errors.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from inspect_ai.model import (
    ChatCompletionChoice,
    ChatMessage,
    ChatMessageAssistant,
    ContentImage,
    ContentReasoning,
    ContentText,
    GenerateConfig,
    Logprobs,
    ModelOutput,
    ModelUsage,
    StopReason,
)
from inspect_ai.tool import ToolCall, ToolInfo

from treegen.common.outputs import Completion, Score
from treegen.common.params import REQUEST_FIELDS, SamplingParams
from treegen.errors import InputError
from treegen.prompts.grammars import REQUESTED, parse_structure
from treegen.prompts.replies import Reply, ReplyReader
from treegen.prompts.token_text import TokenText, chat_logprobs
from treegen.prompts.tree import Message


def template_messages(messages: Sequence[ChatMessage]) -> list[Message]:
    """Convert the messages of a conversation.

    Raises:
        InputError: A message has content that is neither text nor an image.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> Message:
    converted: dict[str, Any] = {"role": message.role, "content": message.text}
    parts = [] if isinstance(message.content, str) else message.content
    for part in parts:
        if not isinstance(part, ContentText | ContentReasoning | ContentImage):
            raise InputError(
                f"content of type {part.type} is not supported in a message; use only text and "
                "images"
            )
    if any(isinstance(part, ContentImage) for part in parts):
        converted["content"] = [
            {"type": "image", "image": part.image}
            if isinstance(part, ContentImage)
            else {"type": "text", "text": part.text}
            for part in parts
            if isinstance(part, ContentText | ContentImage)
        ]
    thoughts = [part.reasoning for part in parts if isinstance(part, ContentReasoning)]
    if thoughts:
        converted["reasoning_content"] = "\n".join(thoughts)
    if message.role == "assistant" and message.tool_calls:
        converted["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.role == "tool":
        if message.error is not None:
            converted["content"] = f"Error: {message.error.message}"
        converted |= {"name": message.function, "tool_call_id": message.tool_call_id}
    return converted


def template_tools(tools: Sequence[ToolInfo]) -> list[dict[str, Any]] | None:
    """Convert the tools of a conversation; return None if there are none."""
    return [
        {"type": "function", "function": tool.model_dump(exclude={"options"}, exclude_none=True)}
        for tool in tools
    ] or None


# Fields of SamplingParams, by their names in Inspect.
_PARAM_NAMES: Final = {
    **{
        name: name
        for name in (*REQUEST_FIELDS, "max_tokens", "prompt_logprobs")
        if name in GenerateConfig.model_fields
    },
    "num_choices": "n",
    "stop_seqs": "stop",
    "reasoning_tokens": "max_thinking_tokens",
}
# Fields that extra_body may have.
_EXTRA_FIELDS: Final = tuple(name for name in REQUEST_FIELDS if name not in _PARAM_NAMES)
_UNSUPPORTED: Final = (
    "best_of",
    "modalities",
    "effort",
    "verbosity",
    "reasoning_mode",
)


def sampling_params(
    config: GenerateConfig, defaults: Mapping[str, Any] = MappingProxyType({})
) -> SamplingParams:
    """Return the sampling parameters of a generation.

    Args:
        config: Inspect's settings.
        defaults: Defaults for settings that are not given, before those of SamplingParams.

    Raises:
        InputError: A setting is not supported, or has an invalid value.
    """
    unsupported = [name for name in _UNSUPPORTED if getattr(config, name, None) is not None]
    extra = {k: v for k, v in (config.extra_body or {}).items() if k != "chat_template_kwargs"}
    unsupported += [
        f"extra_body[{name!r}]" for name in extra if name not in (*_EXTRA_FIELDS, *REQUESTED)
    ]
    if unsupported:
        raise InputError(
            f"treegen does not support {', '.join(unsupported)}; remove these settings; extra_body "
            f"can have {', '.join((*_EXTRA_FIELDS, *REQUESTED, 'chat_template_kwargs'))}"
        )
    set_fields = {param: getattr(config, option) for option, param in _PARAM_NAMES.items()}
    set_fields = {name: value for name, value in set_fields.items() if value is not None}
    structure = parse_structure({name: extra.pop(name) for name in REQUESTED if name in extra})
    if config.response_schema is not None:
        structure["json_schema"] = config.response_schema.json_schema.model_dump(exclude_none=True)
    if config.top_logprobs and not config.logprobs:
        raise InputError("top_logprobs needs logprobs; set logprobs=True too")
    arguments = {**defaults, **set_fields, **extra, **structure}
    return SamplingParams(**arguments, logprobs=config.top_logprobs or 0)


def template_arguments(config: GenerateConfig, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the chat template.

    Args:
        config: Inspect's settings of the generation, whose arguments take precedence.
        defaults: Arguments that were given for the model.

    Raises:
        InputError: `chat_template_kwargs` of `extra_body` is not a mapping.
    """
    request_arguments = (config.extra_body or {}).get("chat_template_kwargs", {})
    if not isinstance(request_arguments, dict):
        raise InputError(f"chat_template_kwargs must be a mapping, got {request_arguments!r:.80}")
    effort = config.reasoning_effort
    return {
        **defaults,
        **({} if effort is None else {"reasoning_effort": effort}),
        **request_arguments,
    }


_STOP_REASONS: Final[dict[str, StopReason]] = {"length": "max_tokens", "error": "unknown"}


def output_of(
    model: str,
    prompt: Sequence[int],
    completions: Sequence[Completion],
    replies: ReplyReader,
    *,
    text: TokenText,
    tools: Sequence[Any] | None,
    is_structured: bool,
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
        is_structured: Whether the completions have a grammar.
        logprobs: Whether to report log-probabilities.
        seconds: Duration of the generation.
    """
    num_input, num_output = len(prompt), sum(completion.num_tokens for completion in completions)
    choices = []
    for completion in completions:
        reply = replies.read(completion, prompt, tools, is_structured=is_structured)
        message = _message(model, reply)
        reason = _STOP_REASONS.get(completion.finish_reason, "stop")
        choices.append(
            ChatCompletionChoice(
                message=message,
                stop_reason="tool_calls" if message.tool_calls else reason,
                logprobs=_logprobs(prompt, completion, text) if logprobs else None,
                prompt_logprobs=_prompt_logprobs(prompt, completion.prompt_logprobs, text),
            )
        )
    usage = ModelUsage(
        input_tokens=num_input, output_tokens=num_output, total_tokens=num_input + num_output
    )
    return ModelOutput(model=model, choices=choices, usage=usage, time=seconds)


def _message(model: str, reply: Reply) -> ChatMessageAssistant:
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
    num_top = max(map(len, completion.top_logprobs), default=0)
    return Logprobs.model_validate({"content": chat_logprobs(tokens, num_top)})


def _prompt_logprobs(
    prompt: Sequence[int], score: Score | None, text: TokenText
) -> Logprobs | None:
    """Return the log-probabilities of the prompt's tokens except the first."""
    if score is None:
        return None
    tops = list(score.top.pairs()) if score.top is not None else []
    tokens = text.iter_named_tokens(prompt[:1], score.tokens, score.logprobs, tops)
    num_top = max(map(len, tops), default=0)
    return Logprobs.model_validate({"content": chat_logprobs(tokens, num_top)})
