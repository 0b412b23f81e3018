"""Jinja templates of files, rendered in bounded time and memory.

A template is a program by the author of the file. Jinja's sandbox keeps it from the machine, but
not from looping forever, recursing or growing a text without end, and checking a template cannot
rule that out. So a separate process renders it, within a fixed CPU time, memory and length of the
text.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from treegen.common.bounded.worker import FileWorker
from treegen.errors import InputError

SECONDS: Final = 2.0
"""Maximum CPU time of one template."""
_MEMORY: Final = 1 << 30
_FILE: Final = Path(__file__).with_name("template_worker.py")
# One process of each kind serves all of this process.
_CHATS: Final = FileWorker(
    _FILE, "chat", seconds=SECONDS, memory=_MEMORY, what="that renders chat templates", site=True
)
_RUBRICS: Final = FileWorker(
    _FILE, "rubric", seconds=SECONDS, memory=_MEMORY, what="that renders rubrics", site=True
)


class TemplateError(InputError):
    """A template cannot be rendered, or not within its limits."""


def render_chat(tokenizer: Any, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> str:
    """Return what `tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)` returns.

    Args:
        tokenizer: A tokenizer of transformers. A tokenizer that overrides `apply_chat_template` has
            no template from a file, and is called directly.
        messages: Chat messages.
        **kwargs: Further arguments, such as `add_generation_prompt` and those of the template.

    Returns:
        The rendered text.

    Raises:
        TemplateError: The template rejects the messages, or exceeds its limits.
    """
    if not _is_stock(tokenizer):
        try:
            text: str = tokenizer.apply_chat_template(messages, tokenize=False, **kwargs)
        except Exception as error:
            raise TemplateError(" ".join(str(error).split()) or type(error).__name__) from error
        return text
    if kwargs.get("tools"):
        kwargs["tools"] = [_schema(tool) for tool in kwargs["tools"]]
    try:
        source = tokenizer.get_chat_template(kwargs.pop("chat_template", None), kwargs.get("tools"))
    except Exception as error:  # such as several templates without a default
        raise TemplateError(" ".join(str(error).split())) from error
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return render_source(source, messages, special, **kwargs)


def render_source(
    source: str, messages: Sequence[Mapping[str, Any]], special: Mapping[str, str], **kwargs: Any
) -> str:
    """Render a chat template without its tokenizer.

    Args:
        source: The template.
        messages: Chat messages.
        special: The special tokens that the template may show, by name.
        **kwargs: Further variables.

    Raises:
        TemplateError: The template rejects the messages, or exceeds its limits.
    """
    return _text(
        _CHATS,
        {
            "kind": "render",
            "source": source,
            "special": dict(special),
            "messages": list(messages),
            "kwargs": kwargs,
        },
    )


def read_names(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """Return the variables that a chat template reads, and its text constants.

    Args:
        source: The template.

    Raises:
        TemplateError: It is not a template, or reading it exceeds the limits.
    """
    reply = _ask(_CHATS, {"kind": "names", "source": source})
    return frozenset(reply["names"]), frozenset(reply["words"])


def render_rubric(source: str, values: Mapping[str, str]) -> str:
    """Render a rubric's template.

    Args:
        source: The template.
        values: The variables that it may show.

    Raises:
        TemplateError: It cannot be rendered with these, or exceeds its limits.
    """
    return _text(_RUBRICS, {"kind": "render", "source": source, "values": dict(values)})


def read_set(source: str, values: Mapping[str, str], keys: Sequence[str]) -> dict[str, Any]:
    """Return the variables that a rubric's template sets.

    Args:
        source: The template.
        values: The variables that it may show.
        keys: Names of the variables that it may set.

    Raises:
        TemplateError: It cannot be rendered, or exceeds its limits.
    """
    request = {"kind": "set", "source": source, "values": dict(values), "keys": list(keys)}
    try:
        return {key: _from_pairs(value) for key, value in _ask(_RUBRICS, request)["set"].items()}
    except TypeError as error:  # a key that no mapping can have
        raise TemplateError(str(error)) from None


def _is_stock(tokenizer: Any) -> bool:
    base = sys.modules.get("transformers.tokenization_utils_base")
    stock = getattr(base, "PreTrainedTokenizerBase", None)
    method = getattr(type(tokenizer), "apply_chat_template", None)
    return stock is not None and method is stock.apply_chat_template


def _text(worker: FileWorker, request: dict[str, Any]) -> str:
    text: str = _ask(worker, request)["text"]
    return text


def _ask(worker: FileWorker, request: dict[str, Any]) -> dict[str, Any]:
    try:
        import jinja2  # noqa: F401 (imported here, so that the message can say what to install)
    except ImportError:
        raise TemplateError(
            "templates require the package jinja2; install jinja2: pip install jinja2"
        ) from None
    try:
        line = json.dumps(request, ensure_ascii=False, default=_plain)
    except (TypeError, ValueError, RecursionError) as error:
        raise TemplateError(
            f"an argument of the template cannot be written as JSON: {error}"
        ) from None
    reply = worker.ask_line(f"[{len(line)}, {line}]")
    if reply is None:
        raise TemplateError(
            f"the template takes more than {SECONDS:g} s or {_MEMORY >> 30} GiB of memory; "
            "check the loops in the template"
        )
    if "rejected" in reply:
        raise TemplateError(reply["rejected"])
    answer: dict[str, Any] = reply
    return answer


def _schema(tool: Any) -> Any:
    """Convert a tool for templates: transformers makes a JSON schema of a function."""
    if not isinstance(tool, Callable):  # type: ignore[arg-type]
        return tool
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception as error:
        raise TemplateError(" ".join(str(error).split())) from error


def _plain(value: Any) -> Any:
    """Convert an object that JSON cannot hold, in the way that transformers does for templates."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "dtype") and hasattr(value, "item") and not getattr(value, "shape", ()):
        return value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if callable(dump := getattr(value, "model_dump", None)):
        return dump()
    return f"<{type(value).__name__}>"


def _from_pairs(value: Any) -> Any:
    if isinstance(value, dict):
        return {_from_pairs(key): _from_pairs(item) for key, item in value["pairs"]}
    return [_from_pairs(item) for item in value] if isinstance(value, list) else value
