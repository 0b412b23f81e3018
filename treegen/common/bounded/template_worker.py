"""Renders templates in a separate process; see treegen.common.bounded.templates.

It imports nothing of treegen. Chat templates are rendered by transformers' own code, so that a text
is byte for byte what `apply_chat_template` returns.
"""

import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

# Maximum characters of a text: BASE_CHARS, plus CHARS_PER_REQUEST_CHAR per character of a request.
BASE_CHARS = 2**22
CHARS_PER_REQUEST_CHAR = 8
_MAX_ERROR_CHARS = 300  # characters of an error
_GENERATION = re.compile(r"\{%-?\+?\s*(end)?generation\s*-?\+?%\}")


def prepare(kind: str) -> Callable[[Any], Any]:
    """Return the function that answers requests for chats ("chat") or for rubrics ("rubric")."""
    handle: Callable[[int, Any], Any] = {"chat": _chats, "rubric": _rubrics}[kind]()

    def answer(request: Any) -> Any:
        try:
            return handle(*request)
        except MemoryError:
            raise
        except Exception as error:  # a template is a program, which may raise anything
            message = " ".join(f"{error}".split())[:_MAX_ERROR_CHARS]
            return {"rejected": message or type(error).__name__}

    return answer


def _check_length(text: str, request_chars: int) -> dict[str, Any]:
    max_chars = BASE_CHARS + CHARS_PER_REQUEST_CHAR * request_chars
    if len(text) > max_chars:
        message = f"the text has {len(text):,} characters, but the maximum is {max_chars:,}"
        return {"rejected": message}
    return {"text": text}


def _chats() -> Callable[[int, Any], Any]:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

    class Templates(PreTrainedTokenizerBase):  # type: ignore[misc]
        """A tokenizer that can only render chat templates."""

        special_tokens_map: Any = None

        def __init__(self, source: str, special: Mapping[str, str]) -> None:
            # Bypasses the attribute handling of its base.
            self.__dict__.update(chat_template=source, special_tokens_map=special)

    def handle(request_chars: int, request: Any) -> Any:
        if request["kind"] == "names":
            return _names(request["source"])
        tokenizer = Templates(request["source"], request["special"])
        text = tokenizer.apply_chat_template(
            request["messages"], tokenize=False, **request["kwargs"]
        )
        return _check_length(text, request_chars)

    return handle


def _names(source: str) -> dict[str, list[str]]:
    """Return the variables that a chat template reads, and the words that it contains."""
    import jinja2
    from jinja2 import meta, nodes

    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    # Remove transformers' own tag, which marks the assistant's text.
    parsed = environment.parse(_GENERATION.sub("", source))
    words = {const.value for const in parsed.find_all(nodes.Const)}
    return {
        "names": sorted(meta.find_undeclared_variables(parsed)),
        "words": sorted(word for word in words if isinstance(word, str) and len(word) < 100),
    }


def _rubrics() -> Callable[[int, Any], Any]:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        undefined=jinja2.StrictUndefined, autoescape=False, trim_blocks=True, lstrip_blocks=True
    )
    compiled = lru_cache(maxsize=256)(environment.from_string)

    def handle(request_chars: int, request: Any) -> Any:
        template = compiled(request["source"])
        if request["kind"] == "render":
            return _check_length(template.render(request["values"]), request_chars)
        module = template.make_module(request["values"])
        return {
            "set": {
                key: _plain(getattr(module, key)) for key in request["keys"] if hasattr(module, key)
            }
        }

    return handle


def _plain(value: Any) -> Any:
    """Convert a value to JSON; a mapping becomes pairs, because its keys may not be text."""
    if isinstance(value, Mapping):
        return {"pairs": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(
        f"a value must be text, a number, a list or a mapping, got {type(value).__name__}"
    )
