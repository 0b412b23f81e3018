"""Custom search methods: functions in Python files, found by `path/to/file.py:function`."""

import ast
import hashlib
import inspect
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.files import describe_read_error, read_bytes
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError
from treegen.evals.registry import load_member
from treegen.evals.search.method_types import Method, MethodContext, read_signature
from treegen.evals.search.methods import METHODS

if TYPE_CHECKING:
    from treegen.search.tree.result import SearchOutcome

TOOLS: Final = "tools"
"""The name of the parameter that receives the task's functions."""


def is_custom_method(name: str) -> bool:
    """Return whether a method's name refers to a function in a file."""
    return name.partition(":")[0].endswith(".py")


def absolute_method(name: str) -> str:
    """Return a method's name, with the path in path/to/file.py:function made absolute."""
    path, _, function = name.rpartition(":")
    return f"{os.path.abspath(path)}:{function}" if is_custom_method(name) and path else name


def short_name(name: str) -> str:
    """Return a method's name in records and tables: without the folder of a file."""
    path, _, function = name.rpartition(":")
    return f"{Path(path).name}:{function}" if is_custom_method(name) and path else name


def find_method(name: str) -> Method:
    """Return a method by its name, or by `path/to/file.py:function`.

    Raises:
        InputError: there is no such method, its file cannot be read or run, or it is not an async
            function of a root.
    """
    if not is_custom_method(name):
        if name not in METHODS:
            known = f"; known: {', '.join(METHODS)}, or path/to/file.py:function"
            raise InputError(f"there is no method {name!r}{did_you_mean(name, METHODS) or known}")
        return METHODS[name]
    path, colon, function_name = name.rpartition(":")
    if not colon:
        raise InputError(
            f"the method {name} must include the name of a function; use {name}:function"
        )
    file, label = Path(path), short_name(name)
    try:
        source = hashlib.sha256(read_bytes(file)).hexdigest()[:32]
    except OSError as error:
        raise InputError(
            f"the method's file cannot be read: {describe_read_error(path, error)}"
        ) from None
    function = load_member(file, function_name, "function", callable)
    if not _is_async(function):
        raise InputError(
            f"{label} is not an async function; write it as `async def {function_name}"
            "(root, tools)`"
        )
    arguments = read_signature(function, f"method {label}", (TOOLS,))
    return Method(
        _Run(function),
        (),
        ends_early=False,  # it is unknown which of its calls run concurrently
        arguments=arguments,
        source=source,
    )


def read_setting_names(name: str) -> set[str] | None:
    """Return the settings that path/to/file.py:function reads, by its code; None if unknown.

    The file is not run. If the function passes `tools` on, its settings are unknown.
    """
    path, _, function_name = name.rpartition(":")
    try:
        module = ast.parse(read_bytes(Path(path)))
    except (OSError, SyntaxError, ValueError):
        return None
    definitions = [item for item in module.body if getattr(item, "name", None) == function_name]
    if (
        len(definitions) != 1
        or not isinstance(definitions[0], ast.AsyncFunctionDef)
        or definitions[0].decorator_list
    ):
        return None
    settings = {"evaluate"}  # treegen evaluates solutions that the function does not evaluate
    num_unknown = 0
    for node in ast.walk(definitions[0]):
        match node:
            case ast.Name(id="tools"):
                num_unknown += 1
            case ast.Attribute(value=ast.Name(id="tools"), attr=tool):
                num_unknown -= tool != "settings"
                settings |= {"propose", "expand"} if tool == "propose" else set()
            case ast.Attribute(value=ast.Attribute(ast.Name(id="tools"), "settings"), attr=setting):
                num_unknown -= 1
                settings.add(setting)
    return None if num_unknown else settings


def _is_async(function: object) -> bool:
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


class _Run:
    """Calls a user's function with the root of a problem's tree, and reads what it returns."""

    def __init__(self, function: Callable[..., Awaitable[object]]) -> None:
        self._function = function
        self._wants_tools = TOOLS in inspect.signature(function).parameters

    async def __call__(self, on: MethodContext, **arguments: Any) -> "SearchOutcome":
        from treegen.search.budget import BudgetIgnored, BudgetReached
        from treegen.search.strategies.common import collect_outcome
        from treegen.search.tree.result import to_outcome

        if self._wants_tools:
            arguments[TOOLS] = on
        returned: object = None
        stopped = ""
        try:
            returned = await self._function(on.root, **arguments)
        except (BudgetReached, BudgetIgnored) as end:
            stopped = str(end)
        # Solutions are then read from the tree. `tools.finish` returns [] if it found nothing.
        if returned is None or (isinstance(returned, list | tuple) and not returned):
            return await collect_outcome(on.root, on.done, on.evaluate, stopped)
        if (outcome := to_outcome(returned)) is None:
            raise InputError(
                "the search must return a node, a list of nodes with the best node first, a "
                f"SearchOutcome, or None for the solutions in the tree; got {returned!r:.60}"
            )
        return outcome
