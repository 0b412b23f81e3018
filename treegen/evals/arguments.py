"""Read and check arguments of a single task, given as name=value."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from treegen.common.spelling import did_you_mean, hints_at
from treegen.errors import InputError

TRUTHS: Final = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
"""The words for true and false that users may write, in lower case."""


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
                "give it once"
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
        all_names = f"; known: {', '.join(names)}" if names else "; it takes none"
        hints = hints_at(unknown, lambda name: did_you_mean(name, names), all_names)
        listed = " and no ".join(map(repr, unknown))
        raise InputError(f"task {task!r} has no argument {listed}{hints}")


def whole_number(arguments: Mapping[str, str], name: str) -> int | None:
    """Return an argument that is a whole number from 1; None if it is not given.

    Raises:
        InputError: it is not such a number.
    """
    text = arguments.get(name)
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,12}", text.strip()) or int(text) < 1:
        raise InputError(f"task argument {name} must be a whole number from 1, got {text!r}")
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
