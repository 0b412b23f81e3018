"""The inputs of MBPP+ as Python values.

JSON has no tuples, sets or complex numbers. EvalPlus writes lists or texts for them, and its reader
decides by the number of the task which ones to convert back. This is its table by depth: at depth 1
each argument is a tuple, at depth 2 each element of each argument, and so on.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

Arguments = list[Any]


def _deep(depth: int, value: Any) -> Any:
    """Return a value whose lists at a depth are tuples; at depth 1 the list itself becomes one."""
    if depth == 1:
        return tuple(value)
    return [_deep(depth - 1, item) for item in value]


def _each(depth: int, arguments: Arguments) -> Arguments:
    return [_deep(depth, argument) for argument in arguments]


def _first(depth: int, arguments: Arguments) -> Arguments:
    """Convert the lists of the first argument only."""
    return [_deep(depth, arguments[0]), *arguments[1:]]


def _second(arguments: Arguments) -> Arguments:
    return [arguments[0], tuple(arguments[1])]


def _sets(arguments: Arguments) -> Arguments:
    # EvalPlus writes an empty list for {}, which is an empty dict.
    items = [set(item) if isinstance(item, list) and item else {} for item in arguments[0]]
    return [items]


def _angle(arguments: Arguments) -> Arguments:
    return [float(arguments[0]), complex(arguments[1])]


def _number(arguments: Arguments) -> Arguments:
    return [complex(arguments[0])]


def _tuples_of_tuples(arguments: Arguments) -> Arguments:
    return [tuple([tuple(item) for item in argument]) for argument in arguments]


def _tuple_of_any(arguments: Arguments) -> Arguments:
    items = [tuple(item) if isinstance(item, list) else item for item in arguments[0]]
    return [tuple(items)]


def _tuple_values(arguments: Arguments) -> Arguments:
    return [{key: tuple(value) for key, value in arguments[0].items()}, *arguments[1:]]


def _all_tuples(value: Any) -> Any:
    return tuple([_all_tuples(item) for item in value]) if isinstance(value, list) else value


def _whole(arguments: Arguments) -> Arguments:
    return list(_all_tuples(arguments))


_TASKS: Final[tuple[tuple[Callable[[Arguments], Arguments], tuple[int, ...]], ...]] = (
    (
        partial(_each, 1),
        (
            2,
            116,
            132,
            143,
            222,
            261,
            273,
            394,
            399,
            421,
            424,
            429,
            470,
            560,
            579,
            596,
            616,
            630,
            726,
            740,
            744,
            809,
        ),
    ),
    (
        partial(_each, 2),
        (63, 64, 70, 94, 120, 237, 272, 299, 400, 409, 417, 438, 473, 614, 780),
    ),
    (partial(_first, 2), (75, 413, 444, 753)),
    (_second, (106, 750)),
    (_sets, (115,)),
    (_angle, (124,)),
    (partial(_first, 1), (250, 307, 405, 446, 617, 720, 763, 808)),
    (_tuples_of_tuples, (259, 401, 445)),
    (_tuple_of_any, (278,)),
    (_tuple_values, (722,)),
    (_number, (252,)),
    (_whole, (580, 615, 791)),
)
_OF_TASK: Final[Mapping[int, Callable[[Arguments], Arguments]]] = {
    number: change for change, numbers in _TASKS for number in numbers
}


def mbpp_arguments(task_id: str, arguments: Arguments) -> Arguments:
    """Return the arguments of a call as Python values.

    Args:
        task_id: Id of the task, such as "Mbpp/2".
        arguments: The arguments as JSON holds them.

    Raises:
        ValueError: The arguments do not have the form that this task needs.
    """
    number = task_id.rpartition("/")[2]
    change = _OF_TASK.get(int(number)) if number.isdecimal() else None
    if change is None:
        return arguments
    try:
        return change(arguments)
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"an input has not the form of task {task_id}: {error}") from None
