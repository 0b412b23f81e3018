"""Find the field of a tokenizer's settings with an invalid value."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from treegen.errors import ModelError
from treegen.model.checkpoint.files import read_object

_Check = Callable[[Any], bool]


def is_length(value: Any) -> bool:
    """Return whether a value is valid for `model_max_length`; if not set, it is 1e30."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and value >= 0)


def _is_token(value: Any) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    is_text = isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)
    return value is None or is_text


def _are_tokens(value: Any) -> bool:
    tokens = list(value.values()) if isinstance(value, dict) else value
    return value is None or (isinstance(tokens, list) and all(t and _is_token(t) for t in tokens))


def _are_added(value: Any) -> bool:
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        return False
    return all(isinstance(token, dict) and _is_token(token) for token in value.values())


def is_template(value: Any) -> bool:
    """Return whether a value is valid for `chat_template`."""
    if isinstance(value, dict):
        return all(isinstance(text, str) for text in value.values())
    if isinstance(value, list):
        names = ("name", "template")
        return all(
            isinstance(t, dict) and all(isinstance(t.get(n), str) for n in names) for t in value
        )
    return value is None or isinstance(value, str)


_TOKEN: Final = ("a token, or an object with its content", _is_token)
_TOKENS: Final = ("a list of tokens, or an object of them", _are_tokens)
_SIDE: Final = ('"left" or "right"', lambda value: value in ("left", "right"))
_ENDS: Final = {
    f"{name}_token": _TOKEN for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
}
_FIELDS: Final[dict[str, tuple[str, _Check]]] = {
    **_ENDS,
    "model_max_length": ("a number of tokens", is_length),
    "added_tokens_decoder": ("an object from ids to tokens", _are_added),
    "additional_special_tokens": (
        "a list of tokens",
        lambda value: not isinstance(value, dict) and _are_tokens(value),
    ),
    "extra_special_tokens": _TOKENS,
    "chat_template": ("a text, or templates with their names", is_template),
    "padding_side": _SIDE,
    "truncation_side": _SIDE,
    "split_special_tokens": ("true or false", lambda value: isinstance(value, bool)),
    "model_input_names": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    "auto_map": ("an object", lambda value: isinstance(value, dict)),
    "tokenizer_class": ("a name", lambda value: value is None or isinstance(value, str)),
}


def check_fields(directory: Path) -> None:
    """Raise ModelError that names the first field of a tokenizer's settings with an invalid value.

    Call this for a tokenizer that fails. A tokenizer that never reads the field may work in spite
    of such a value.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings: dict[str, Any] = {}
        with suppress(ModelError):  # no such file, or its error is reported elsewhere
            settings = read_object(directory / name)
        for field, (what, is_right) in _FIELDS.items():
            if field in settings and not is_right(settings[field]):
                raise ModelError(
                    f"{directory / name}: {field} is {settings[field]!r:.60}, not {what}; mend it, "
                    "or download the file again"
                )
