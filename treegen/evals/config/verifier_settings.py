"""Settings of a verifier that users give by name, checked before the verifier is loaded."""

from collections.abc import Mapping
from typing import Any, Final

from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, arg
from treegen.evals.arguments import TRUTHS

DEFAULTS: Final[Mapping[str, Any]] = {
    "mark": "",
    "separator": "\n\n",
    "tokens": ("+", "-"),
    "label": None,
    "reduce": "last",
    "chat": None,
    "turns": False,
}
"""The settings of `treegen.model.scorers.verifier.Verifier` that users set, and their defaults."""


def parse_verifier_settings(texts: Mapping[str, str]) -> dict[str, Any]:
    r"""Return the values of settings that differ from their defaults. In texts, \n is a newline.

    Raises:
        InputError: a name or a value cannot be used.
    """
    settings: dict[str, Any] = {}
    for name, text in check_verifier_settings(texts).items():
        value = _value(name, text)
        if value != DEFAULTS[name]:
            settings[name] = value
    return settings


def check_verifier_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings with lists as tuples.

    Raises:
        InputError: a name is unknown.
    """
    for name in settings:
        if name not in DEFAULTS:
            hint = did_you_mean(name, DEFAULTS) or f"; known: {', '.join(DEFAULTS)}"
            raise InputError(f"a verifier has no setting {name!r}{hint}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}


def _value(name: str, text: str) -> Any:
    if name in ("mark", "separator"):
        value = text.replace(r"\n", "\n")
        if name == "separator" and not value:
            raise InputError("the separator between steps must not be empty")
        return value
    if name == "tokens":
        pair = text.split(",")
        if len(pair) != 2 or not all(pair):
            raise InputError(f"tokens must be two tokens with a comma between them, got {text!r}")
        return tuple(pair)
    if name in ("chat", "turns"):
        if text.lower() not in TRUTHS:
            raise InputError(f"{arg(name)} must be true or false, got {text!r}")
        return TRUTHS[text.lower()]
    if name == "label":
        if not text.isdecimal():
            raise InputError(f"{arg('label')} must be a whole number from 0 on, got {text!r}")
        return int(text)
    from treegen.model.scorers.verifier import REDUCE

    if text not in REDUCE:
        raise InputError(f"{arg('reduce')} must be one of {', '.join(REDUCE)}, got {text!r}")
    return text
