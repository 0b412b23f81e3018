"""Types of search methods: their settings, and the context in which they search a problem.

Also the names of the ways to choose an answer, to propose steps and to evaluate states, and the
arguments of a function, read from text by the types in its signature.
"""

import inspect
import math
import re
import types
import typing
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Protocol

from treegen.errors import InputError
from treegen.evals.arguments import TRUTHS
from treegen.evals.config.type_checks import Count as Count
from treegen.evals.config.type_checks import Maximum, Minimum

if TYPE_CHECKING:
    from treegen.search.tree.node import SearchNode
    from treegen.search.tree.result import SearchOutcome

REQUIRED: Final = inspect.Parameter.empty


_TYPES: Final = "int, float, str, bool, Literal, X | None or tuple[X, ...]"


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument that a user can give by name."""

    name: str
    kind: Any
    """Its type."""
    default: Any = REQUIRED
    """REQUIRED if it has none."""


def read_signature(
    function: Callable[..., Any], label: str = "the function", filled: Sequence[str] = ()
) -> tuple[Argument, ...]:
    """Return the arguments of a function except its first one.

    Args:
        function: The function; its first parameter is the root node.
        label: The function's name in messages.
        filled: Names of parameters that the caller fills.

    Raises:
        InputError: the function takes no first argument, or has one that cannot be parsed from
            text.
    """
    try:
        first, *parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise InputError(f"{label} has no argument; add an argument for the root node") from None
    if first.kind in (first.KEYWORD_ONLY, first.VAR_KEYWORD):
        raise InputError(
            f"{label} has no positional argument; make its first argument the root node"
        )
    arguments = []
    for parameter in parameters:
        if parameter.name in filled or parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            continue
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise InputError(
                f"the argument {parameter.name} of {label} must not be positional-only; remove "
                f"the / after {parameter.name}"
            )
        arguments.append(
            Argument(
                parameter.name, _read_annotation(parameter, function, label), parameter.default
            )
        )
    return tuple(arguments)


def read_values(
    arguments: Sequence[Argument], texts: Mapping[str, Any], label: str, also: Sequence[str] = ()
) -> dict[str, Any]:
    """Return the values of all arguments that JSON can hold, defaults included.

    Args:
        arguments: The arguments of the function.
        texts: Texts, or values that were parsed before, by name.
        label: The function's name in messages.
        also: Further names that `texts` may have; they are left out.

    Raises:
        InputError: a name is not known, a value has another type, or one is missing.
    """
    # It is slow to import, and help does not need it.
    from treegen.common.spelling import did_you_mean, suggest_arguments

    names = [argument.name for argument in arguments]
    if unknown := [name for name in texts if name not in names and name not in also]:
        known = f"; known: {', '.join(names)}" if names else "; the method has no arguments"
        hints = suggest_arguments(unknown, lambda name: did_you_mean(name, names), known)
        raise InputError(f"{label} has no argument {' and no '.join(map(repr, unknown))}{hints}")
    values = {}
    for argument in arguments:
        if argument.name in texts:
            values[argument.name] = _read(
                argument.kind, texts[argument.name], f"{label}: {argument.name}"
            )
        elif argument.default is REQUIRED:
            raise InputError(
                f"{label} requires the argument {argument.name}; pass -a {argument.name}=VALUE"
            )
        elif _is_plain(argument.default):
            values[argument.name] = _tuples_to_lists(argument.default)
    return values


def to_call_values(arguments: Sequence[Argument], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as the function takes them: lists become tuples if it declares tuples."""
    kinds = {argument.name: argument.kind for argument in arguments}
    return {
        name: tuple(value)
        if isinstance(value, list) and typing.get_origin(kinds[name]) is tuple
        else value
        for name, value in values.items()
    }


def _read_annotation(parameter: inspect.Parameter, function: Callable[..., Any], label: str) -> Any:
    kind = parameter.annotation
    if isinstance(kind, str):
        try:
            kind = eval(kind, getattr(inspect.unwrap(function), "__globals__", {}))
        except Exception as error:
            raise InputError(
                f"the type {kind!r} of {parameter.name} in {label} cannot be read: {error}; "
                f"use {_TYPES}"
            ) from None
    if kind is REQUIRED:
        default = parameter.default
        kind = str if default is REQUIRED or default is None else type(default)
    if not _is_readable(kind):
        name = getattr(kind, "__name__", None) or str(kind)
        raise InputError(
            f"{parameter.name} of {label} has the type {name}, which cannot be written as text; "
            f"use {_TYPES}"
        )
    return kind


def _is_readable(kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _is_readable(parts[0])
    if origin is Literal:
        return all(isinstance(part, str | int) for part in parts)
    if origin in (typing.Union, types.UnionType):
        return all(part is types.NoneType or _is_readable(part) for part in parts)
    if origin is tuple:
        return len(parts) == 2 and parts[1] is ... and _is_readable(parts[0])
    if origin is list:
        return _is_readable(parts[0])
    return kind in (int, float, str, bool)


def _read(kind: Any, text: Any, label: str) -> Any:
    if not isinstance(text, str):
        return text  # already parsed, in a stored run
    try:
        return _value(kind, text.strip())
    except ValueError:
        raise InputError(f"{label} must be {_describe_type(kind)}, got {text!r}") from None


def _value(kind: Any, text: str) -> Any:
    """Return the value that a text represents; raise ValueError if the type has no such value."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        value = _value(parts[0], text)
        return value if all(_is_within(value, bound) for bound in _bounds(parts)) else _reject()
    if origin is Literal:
        return {str(part): part for part in parts}[text] if text in map(str, parts) else _reject()
    if origin in (typing.Union, types.UnionType):
        if types.NoneType in parts and text.lower() == "none":
            return None
        for part in parts:
            try:
                return _value(part, text) if part is not types.NoneType else _reject()
            except ValueError:
                continue
        return _reject()
    if origin in (tuple, list):
        return [_value(parts[0], word.strip()) for word in text.split(",") if word.strip()]
    if kind is bool:
        return TRUTHS[text.lower()] if text.lower() in TRUTHS else _reject()
    if kind is int:
        return int(text) if re.fullmatch(r"[-+]?[0-9]{1,18}", text) else _reject()
    if kind is float:
        number = float(text)
        return number if math.isfinite(number) else _reject()
    return text


def _bounds(parts: Sequence[Any]) -> list[Minimum | Maximum]:
    return [part for part in parts[1:] if isinstance(part, Minimum | Maximum)]


def _is_within(value: float, bound: Minimum | Maximum) -> bool:
    return value >= bound.value if isinstance(bound, Minimum) else value <= bound.value


def _reject() -> Any:
    raise ValueError


def _describe_type(kind: Any) -> str:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        bounds = [
            f">= {bound.value}" if isinstance(bound, Minimum) else f"<= {bound.value}"
            for bound in _bounds(parts)
        ]
        return f"{_describe_type(parts[0])} {' and '.join(bounds)}".rstrip()
    if origin is Literal:
        return f"one of {', '.join(map(str, parts))}"
    if origin in (typing.Union, types.UnionType):
        return " or ".join("none" if p is types.NoneType else _describe_type(p) for p in parts)
    if origin in (tuple, list):
        return f"{_describe_type(parts[0])}, or several with commas between"
    names = {int: "an integer", float: "a number", bool: "true or false"}
    return names.get(kind, "text")


def _is_plain(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int)


def _tuples_to_lists(value: Any) -> Any:
    return list(map(_tuples_to_lists, value)) if isinstance(value, list | tuple) else value


# Ways to choose the answer from the solutions that a method has found.
CHOOSE: Final = {
    "best": "the answer of the solution with the highest value",
    "vote": "the answer whose solutions have the largest sum of values, each from 0 to 1",
}
# Ways that all tasks share; a task may have further ways.
PROPOSE: Final = ("sample",)
EVALUATE: Final = ("logprob", "min-logprob")
# reward:DIR evaluates states with the reward model in a directory.
REWARD: Final = "reward:"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeSettings:
    """The settings that shape a tree."""

    width: Count
    """States to keep at a time."""
    depth: Count
    """The largest number of steps of a solution."""
    expand: Count
    """Next steps to try in a state."""
    num_samples: Count
    """The largest number of solutions that best-of-n and a majority vote draw."""
    propose: str
    """The way to make next steps."""
    evaluate: str
    """The way to evaluate states."""
    prune_below: float | None = None
    """Depth-first search prunes states of a lower value; None prunes none."""
    exploration: Annotated[float, Minimum(0)] = 1.4
    """The constant of MCTS."""
    iterations: Count = 1000
    """The largest number of visits of MCTS to the tree."""
    rollouts: Annotated[int, Minimum(0)] = 1
    """The number of samples that MCTS completes from a new state. With 0 it uses the value of the
    state itself."""


class MethodContext(Protocol):
    """The context of a method: one problem, with the functions that strategies call."""

    root: "SearchNode"
    """The root of the problem's tree."""
    settings: TreeSettings
    """The settings that shape the tree."""
    checkable: bool
    """Whether the problem alone decides if a solution is correct."""

    is_agent: bool
    """Whether steps are tool calls of an agent, and not pieces of a text."""

    def done(self, node: "SearchNode") -> bool:
        """Return whether a node ends a solution."""

    def is_solved(self, node: "SearchNode") -> bool:
        """Return whether a node is a correct solution; False if the problem alone cannot decide."""

    def state(self, node: "SearchNode") -> Hashable:
        """Return the state of a node. States are equal if the same steps can follow."""

    def answer(self, node: "SearchNode") -> str | None:
        """Return the answer of a solution; None if it has none."""

    async def step(self, node: "SearchNode", n: int) -> "Sequence[SearchNode]":
        """Sample n next steps."""

    async def finish(self, node: "SearchNode", n: int) -> "Sequence[SearchNode]":
        """Sample n whole solutions from a node on."""

    def instruct(self, node: "SearchNode", text: str) -> "SearchNode":
        """Append an instruction to a node, such as a request for feedback."""

    async def ask(self, node: "SearchNode", text: str, max_tokens: int) -> str:
        """Return the model's answer to a question about an episode of an agent.

        Args:
            node: The last node of the episode so far.
            text: The question.
            max_tokens: Maximum number of tokens of the answer.
        """

    async def propose(self, node: "SearchNode") -> "Sequence[SearchNode]":
        """Make next steps in the way that the settings name."""

    async def evaluate(self, nodes: "Sequence[SearchNode]") -> list[float]:
        """Return the values of nodes, evaluated in the way that the settings name."""

    async def chance(self, nodes: "Sequence[SearchNode]") -> list[float]:
        """Return values of nodes from 0 to 1."""


@dataclass(frozen=True, slots=True)
class Method:
    """A way to search one problem."""

    run: "Callable[..., Awaitable[SearchOutcome]]"
    """Searches once."""
    setting_names: tuple[str, ...]
    """Names of the settings that it reads."""
    votes: bool = False
    """Whether it chooses its answer by its own vote."""
    on_scale: bool = False
    """Whether the values of its nodes are from 0 to 1, however they are evaluated."""
    ends_early: bool = True
    """Whether one correct solution ends the whole search. It is False if parts of the tree grow
    independently, because the tree would then depend on what else runs."""
    joins_path: bool = True
    """Whether a solution is the text of the whole path to its node, and not of the node alone."""
    needs_text: bool = False
    """Whether it works on texts alone, and not on the steps of an agent."""
    needs_agent: bool = False
    """Whether it works on the steps of an agent alone."""
    arguments: tuple[Argument, ...] = ()
    """Its own arguments, which users give by name; `run` takes them as keywords."""
    source: str | None = None
    """A hash of its file; None if it comes with treegen."""
