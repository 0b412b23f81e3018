"""Read and check what users give as name=value: arguments of a task, settings of a verifier."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from treegen.common.spelling import did_you_mean, suggest_arguments
from treegen.errors import InputError, arg

TRUTHS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""The words for true and false that users may write, in lower case."""
VERIFIER_DEFAULTS: Final[Mapping[str, Any]] = {
    "mark": "",
    "separator": "\n\n",
    "tokens": ("+", "-"),
    "label": None,
    "reduce": "last",
    "chat": None,
    "turns": False,
}
"""The settings of `treegen.model.scorers.verifier.Verifier` that users set, and their defaults."""


def read_arguments(texts: Iterable[str], of: str = "task") -> dict[str, str]:
    """Return the arguments in texts of the form name=value; a value may be any text.

    Args:
        texts: The texts, such as "size=3".
        of: Whose arguments they are, for messages.

    Raises:
        InputError: a text has another form, or a name has two values.
    """
    arguments: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise InputError(f"a {of} argument must be name=value, got {text!r}")
        if name in arguments and arguments[name] != value:
            raise InputError(
                f"{of} argument {name} is given twice, as {arguments[name]!r} and {value!r}; "
                "pass the argument once"
            )
        arguments[name] = value
    return arguments


def check_arguments(task: str, names_given: Iterable[str], known: Iterable[str]) -> None:
    """Raise InputError for an argument that the task does not know.

    Args:
        task: The task's name, for the message.
        names_given: Names of the arguments that the user gave.
        known: Names of the arguments that the task knows.
    """
    names = list(known)
    if unknown := [name for name in names_given if name not in names]:
        all_names = f"; known: {', '.join(names)}" if names else "; the task has no arguments"
        hints = suggest_arguments(unknown, lambda name: did_you_mean(name, names), all_names)
        listed = " and no ".join(map(repr, unknown))
        raise InputError(f"task {task!r} has no argument {listed}{hints}")


def whole_number(arguments: Mapping[str, str], name: str) -> int | None:
    """Return an argument that is a positive integer; None if it is not given.

    Raises:
        InputError: it is not such a number.
    """
    text = arguments.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()) or int(text) < 1:
        raise InputError(f"task argument {name} must be a positive integer, got {text!r}")
    return int(text)


def one_of(arguments: Mapping[str, str], name: str, known: Sequence[str], default: str) -> str:
    """Return an argument that must be one of several words.

    Args:
        arguments: All arguments of the task, by name.
        name: The argument's name.
        known: The words that it may be.
        default: Its value if it is not given.

    Raises:
        InputError: it is none of these words.
    """
    text = arguments.get(name, default).strip()
    if text not in known:
        hint = did_you_mean(text, known)
        raise InputError(
            f"task argument {name} must be one of {', '.join(known)}, got {text!r}{hint}"
        )
    return text


def words(arguments: Mapping[str, str], name: str) -> tuple[str, ...]:
    """Return the comma-separated parts of an argument; empty if it is not given."""
    parts = [part.strip() for part in arguments.get(name, "").split(",")]
    return tuple(part for part in parts if part)


def parse_verifier_settings(texts: Mapping[str, str]) -> dict[str, Any]:
    r"""Return the values of settings that differ from their defaults. In texts, \n is a newline.

    Raises:
        InputError: a name or a value cannot be used.
    """
    settings: dict[str, Any] = {}
    for name, text in check_verifier_settings(texts).items():
        value = _read_verifier_setting(name, text)
        if value != VERIFIER_DEFAULTS[name]:
            settings[name] = value
    return settings


def check_verifier_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return stored settings with lists as tuples.

    Raises:
        InputError: a name is unknown.
    """
    known = list(VERIFIER_DEFAULTS)
    for name in settings:
        if name not in known:
            hint = did_you_mean(name, known) or f"; known: {', '.join(known)}"
            raise InputError(f"a verifier has no setting {name!r}{hint}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in settings.items()}


def _read_verifier_setting(name: str, text: str) -> Any:
    if name in ("mark", "separator"):
        value = text.replace(r"\n", "\n")
        if name == "separator" and not value:
            raise InputError("the separator between steps must not be empty")
        return value
    if name == "tokens":
        pair = text.split(",")
        if len(pair) != 2 or not all(pair):
            raise InputError(f"tokens must be two tokens separated by a comma, got {text!r}")
        return tuple(pair)
    if name in ("chat", "turns"):
        if text.lower() not in TRUTHS:
            raise InputError(f"{arg(name)} must be true or false, got {text!r}")
        return TRUTHS[text.lower()]
    if name == "label":
        if not re.fullmatch(r"[0-9]{1,12}", text):
            raise InputError(f"{arg('label')} must be a non-negative integer, got {text!r:.40}")
        return int(text)
    from treegen.model.scorers.verifier import REDUCE

    if text not in REDUCE:
        raise InputError(f"{arg('reduce')} must be one of {', '.join(REDUCE)}, got {text!r}")
    return text
