"""What the body of a request asks for. What would change the answer and is not known is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from treegen.errors import InputError
from treegen.params import SamplingParams
from treegen.prompts.tree import Message

MAX_TOP: Final = 20
_MAX_STOPS: Final = 64
_DEFAULT_MAX_TOKENS: Final = 16  # of /v1/completions, as OpenAI has it

# Names of SamplingParams that requests may have as they are; the last ones as vLLM's server has.
_SAMPLING: Final = (
    "temperature", "top_p", "seed", "n", "presence_penalty", "frequency_penalty",
    "top_k", "min_p", "min_tokens", "stop_token_ids", "ignore_eos", "repetition_penalty",
    "max_thinking_tokens",
)  # fmt: skip
_READ: Final = ("model", "stream", "stream_options", "stop", "logit_bias", "max_tokens", "logprobs")
# What changes no answer.
_HARMLESS: Final = (
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "parallel_tool_calls",
)  # fmt: skip
_KNOWN: Final = {
    "completions": {"prompt", "echo", "best_of", "suffix"},
    "chat": {
        "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice",
        "response_format", "chat_template_kwargs", "separate_reasoning",
    },
}  # fmt: skip


class AskError(InputError):
    """A request that cannot be served. param: the parameter at fault, if it is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class Ask:
    """A request as it was understood.

    model: the name that it gives. prompts: what to sample from; chat has one.
    params: how to sample. draws: whether anything is to be sampled; else prompts are only echoed.
    streams: whether to stream; with_usage: whether the stream ends with the usage.
    echo: whether to give the prompt before the text. logprobs: whether to report them.
    tools, template: for the chat template. With tools, calls are looked for in the text.
    separates: whether thinking is given apart from the content, as `reasoning_content`.
    """

    model: str
    prompts: list[str | list[int] | list[Message]]
    params: SamplingParams
    is_chat: bool
    draws: bool = True
    streams: bool = False
    with_usage: bool = False
    echo: bool = False
    logprobs: bool = False
    tools: list[Any] | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    separates: bool = False


def read_json(body: bytes) -> dict[str, Any]:
    """The object that a body is.

    Raises:
        AskError: it is none.
    """
    try:
        found = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise AskError(f"the body is no JSON: {error}") from None
    if not isinstance(found, dict):
        raise AskError("the body is no JSON object")
    return {name: value for name, value in found.items() if value is not None}


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")


def read_ask(body: Mapping[str, Any], *, is_chat: bool, context_length: int) -> Ask:
    """What the body of a request asks for.

    context_length: tokens of a chat's answer at most, where it says nothing.

    Raises:
        AskError: it asks for what cannot be done.
        InputError: a sampling parameter cannot be used.
    """
    known = {*_SAMPLING, *_READ, *_HARMLESS, *_KNOWN["chat" if is_chat else "completions"]}
    for name in body:
        if name not in known:
            raise AskError(f"{name} is not supported; leave it out", name[:80])
    given = {name: body[name] for name in _SAMPLING if name in body}
    max_tokens = _max_tokens(body, context_length if is_chat else _DEFAULT_MAX_TOKENS)
    streams = _flag(body, "stream")
    options = _typed(body, "stream_options", dict, {})
    if options and not streams:
        raise AskError("stream_options is for stream=true", "stream_options")
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise AskError(f"stream_options has {name}, which is not supported", "stream_options")
    num_top, logprobs = _logprobs(body, is_chat=is_chat)
    echo = _flag(body, "echo")
    if echo and num_top:
        raise AskError("logprobs with echo must be 0 (no alternatives for prompts)", "logprobs")
    if echo and streams and logprobs:
        raise AskError("logprobs with echo cannot be streamed", "logprobs")
    if not max_tokens and not (echo and not streams):
        raise AskError("max_tokens 0 is only for echo, not streamed; ask for 1 or more",
                       "max_tokens")  # fmt: skip
    if "best_of" in body and body["best_of"] != body.get("n", 1):
        raise AskError("best_of other than n is not supported; leave it out", "best_of")
    if body.get("suffix"):
        raise AskError("suffix is not supported; leave it out", "suffix")
    separates = _flag(body, "separate_reasoning")
    if separates and streams:
        raise AskError("separate_reasoning cannot be streamed; leave out one of the two",
                       "separate_reasoning")  # fmt: skip
    params = SamplingParams(
        **given,
        reasoning_tags="auto" if separates else None,
        max_tokens=max(max_tokens, 1),
        stop=_stops(body),
        logprobs=num_top,
        logit_bias=_bias(body),
    )
    tools, template = _tools(body), _typed(body, "chat_template_kwargs", dict, {})
    return Ask(
        model=_typed(body, "model", str, ""),
        prompts=[_messages(body)] if is_chat else _prompts(body),
        params=params,
        is_chat=is_chat,
        draws=max_tokens > 0,
        streams=streams,
        with_usage=_flag(options, "include_usage"),
        echo=echo,
        logprobs=logprobs,
        tools=tools,
        template=template,
        separates=separates,
    )


def _typed(body: Mapping[str, Any], name: str, kind: type, default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise AskError(f"{name} must be {kind.__name__}, got {value!r:.80}", name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    return bool(_typed(body, name, bool, False))


def _max_tokens(body: Mapping[str, Any], default: int) -> int:
    both = [_typed(body, name, int, None) for name in ("max_completion_tokens", "max_tokens")]
    found = next((value for value in both if value is not None), default)
    if found < 0:
        raise AskError(f"max_tokens must be at least 0, got {found}", "max_tokens")
    return int(found)


def _logprobs(body: Mapping[str, Any], *, is_chat: bool) -> tuple[int, bool]:
    """How many alternatives to report, and whether to report log-probabilities at all."""
    name = "top_logprobs" if is_chat else "logprobs"
    num = _typed(body, name, int, None)
    wanted = _flag(body, "logprobs") if is_chat else num is not None
    if num is not None and not 0 <= num <= MAX_TOP:
        raise AskError(f"{name} must be from 0 to {MAX_TOP}, got {num}", name)
    if num and not wanted:
        raise AskError("top_logprobs needs logprobs=true", name)
    return num or 0, wanted


def _stops(body: Mapping[str, Any]) -> tuple[str, ...]:
    stop = body.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, list | tuple) or any(not isinstance(each, str) for each in stops):
        raise AskError("stop must be a string or a list of strings", "stop")
    if len(stops) > _MAX_STOPS:
        raise AskError(f"stop has {len(stops):,} strings; give at most {_MAX_STOPS}", "stop")
    return tuple(each for each in stops if each)


def _bias(body: Mapping[str, Any]) -> dict[int, float] | None:
    bias = _typed(body, "logit_bias", dict, {})
    try:
        return {int(token): value for token, value in bias.items()} or None
    except ValueError:
        raise AskError("logit_bias must map token ids to numbers", "logit_bias") from None


def _prompts(body: Mapping[str, Any]) -> list[str | list[int] | list[Message]]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(each) is int for each in prompt):
            return [prompt]
        if all(isinstance(each, str) for each in prompt) or all(
            isinstance(each, list) and each and all(type(token) is int for token in each)
            for each in prompt
        ):
            return prompt
    raise AskError("prompt must be a string, token ids, or a list of strings or of token ids",
                   "prompt")  # fmt: skip


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise AskError("messages must be a list of at least one message", "messages")
    return [_message(each) for each in messages]


def _message(message: Any) -> Message:
    if not isinstance(message, dict):
        raise AskError("a message must be an object", "messages")
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        texts = [text for text in parts if isinstance(text, str)]
        if len(texts) < len(content):
            raise AskError("only parts of type text are supported in messages", "messages")
        found["content"] = "".join(texts)
    for call in _typed(found, "tool_calls", list, []):
        _read_arguments(call)
    return found


def _read_arguments(call: Any) -> None:
    """Give a tool call its arguments as an object, as chat templates expect them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise AskError("tool_calls must have functions", "messages")
    if isinstance(arguments := function.get("arguments"), str):
        function["arguments"] = read_json(arguments.encode("utf-8", "replace"))


def _tools(body: Mapping[str, Any]) -> list[Any] | None:
    tools = _typed(body, "tools", list, None)
    choice = body.get("tool_choice", "auto" if tools else "none")
    if choice not in ("auto", "none"):
        raise AskError("tool_choice must be auto or none", "tool_choice")
    if body.get("response_format", {"type": "text"}) != {"type": "text"}:
        raise AskError("response_format other than text is not supported", "response_format")
    return tools if tools and choice == "auto" else None
