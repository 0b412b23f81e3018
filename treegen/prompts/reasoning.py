"""Translates `reasoning` (on, off or an effort) into the arguments of a model's chat template.

Each family of thinking models has its own template argument. A node says
`template={"reasoning": "off"}` instead, and the argument follows from the template.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Final

from treegen.common.bounded.templates import TemplateError, read_names
from treegen.errors import InputError, arg

CHOICES: Final = ("auto", "on", "off", "low", "medium", "high")
"""Allowed values; "auto" leaves the decision to the template."""
NAME: Final = "reasoning"

_SWITCHES: Final = ("enable_thinking", "thinking", "reasoning")  # true or false
# Variables that every template receives; they are not arguments.
_ALWAYS: Final = frozenset(
    {
        "messages",
        "add_generation_prompt",
        "bos_token",
        "eos_token",
        "pad_token",
        "unk_token",
        "raise_exception",
        "strftime_now",
    }
)
_EFFORT: Final = "reasoning_effort"  # one of these words:
_EFFORTS: Final = ("none", "minimal", "low", "medium", "high")


def reasoning_arguments(template: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return chat template arguments with `reasoning` translated to the template's own argument.

    Raises:
        InputError: the template has no such argument, or jinja2 is missing.
    """
    arguments = dict(template)
    choice = arguments.get(NAME)
    if choice not in CHOICES or not isinstance(choice, str):
        return arguments  # no argument, or one that the template itself defines
    del arguments[NAME]
    if choice == "auto":
        return arguments
    return {**_get_reasoning_arguments(choice, tokenizer), **arguments}


def check_known(arguments: Mapping[str, Any], tokenizer: Any) -> None:
    """Raise InputError for arguments that the chat template would silently ignore."""
    names, _ = _read(_source(tokenizer, arguments.get("tools")))
    if unknown := sorted(set(arguments) - names):
        if unknown == ["tools"]:
            raise InputError(
                "the model's chat template does not use tools; remove the tools, or load the model "
                f"with {arg('chat_template', 'TEMPLATE')} and a template that uses tools"
            )
        readable = ", ".join(sorted(names - _ALWAYS))
        reads = f"This template reads: {readable}" if readable else "This template reads none"
        raise InputError(
            f"the model's chat template does not read the arguments {', '.join(unknown)}; remove "
            f"the arguments, or use another chat template. {reads}"
        )


def check_reasoning(choice: str) -> None:
    """Raise InputError unless `choice` is one of `CHOICES`."""
    if choice not in CHOICES:
        raise InputError(f"{arg('reasoning')} must be one of {', '.join(CHOICES)}, got {choice!r}")


def _get_reasoning_arguments(choice: str, tokenizer: Any) -> dict[str, Any]:
    names, words = _read(_source(tokenizer))
    switch = next((name for name in _SWITCHES if name in names), None)
    has_effort = _EFFORT in names
    if choice in ("on", "off") and switch is not None:
        return {switch: choice == "on"}
    if choice == "on" and has_effort:
        return {_EFFORT: "medium" if "medium" in words else "high"}
    if choice == "off" and "none" in words and has_effort:
        return {_EFFORT: "none"}
    if choice not in ("on", "off") and has_effort:
        return {_EFFORT: choice, **({switch: True} if switch else {})}
    supported = [name for name in (*_SWITCHES, _EFFORT) if name in names]
    has = (
        f"this template has only {', '.join(supported)}" if supported else "this template has none"
    )
    raise InputError(
        f"reasoning {choice!r} requires a chat template with one of the arguments "
        f"{', '.join(_SWITCHES)} or {_EFFORT}; {has}. Set reasoning to auto, or pass the argument "
        "of the template by name"
    )


def _source(tokenizer: Any, tools: Any = None) -> str:
    """Return the chat template; tokenizers may have several, one of them for tools."""
    source = getattr(tokenizer, "chat_template", None)
    if isinstance(source, Mapping):
        source = tokenizer.get_chat_template(tools=tools)
    return str(source or "")


@functools.lru_cache(maxsize=16)
def _read(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the arguments that a chat template reads, and the words for effort that it has."""
    try:
        names, words = read_names(source)
    except TemplateError as error:
        raise InputError(
            f"the chat template cannot be read: {error}; correct chat_template in the checkpoint"
        ) from None
    return names, words & frozenset(_EFFORTS)
