"""Runs one program in a confined child. Nothing that comes from here can be trusted.

The report on descriptor 3 is one line for each stage. Lines up to "compiled" were written before
the program's first instruction. Later lines may be the program's own invention.
"""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import functools
import gc
import os
import sys
import threading
import traceback
import types
from typing import Any, Final, NoReturn

from treegen.tasks.sandbox import value_json

REPORT = 3
_NAME = "<program>"
_BODY = "__program__"


def report(line: str) -> None:
    """Write one line of the report."""
    data = line.replace("\n", " ").encode("utf-8", "backslashreplace") + b"\n"
    while data:
        data = data[os.write(REPORT, data) :]


def run(source: str, prelude: str, call: str | None, *, may_return: bool) -> NoReturn:
    """Run a program as Python would run a script, or call a function of it. Never returns.

    Args:
        call: The function and its arguments, as `values.encode` writes them; None runs a script.
        may_return: If the source is no script but would be the body of a function, it runs as one.
    """
    _fresh_streams()
    module = types.ModuleType("__main__" if call is None else "solution")
    status = 1
    try:
        status = _run(module, source, prelude, call, may_return=may_return)
    except SystemExit as error:
        status = _exit_status(error)
    finally:
        _finish(module, status)


def _run(
    module: types.ModuleType, source: str, prelude: str, call: str | None, *, may_return: bool
) -> int:
    try:
        codes = [_compile(prelude), _compile(source, may_return=may_return)]
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError) as error:
        report(f"compile_error {type(error).__name__}: {error}")
        return 1
    request = None if call is None else value_json.loads(call)
    module.__dict__["__builtins__"] = builtins
    for name in [name for name in sys.modules if name.split(".")[0] == "treegen"]:
        del sys.modules[name]
    sys.modules[module.__name__] = module
    threading.excepthook = _thread_failed
    report("compiled")
    try:
        for code in codes:
            exec(code, module.__dict__)
        if request is not None:
            _call(module, *request)
    except SystemExit:
        raise
    except BaseException as error:
        _report_failure(error)
        return 1
    return 0


def _compile(source: str, *, may_return: bool = False) -> types.CodeType:
    try:
        # The source is a str, so a coding cookie in it means nothing.
        return compile(source, _NAME, "exec", 0, True)
    except SyntaxError as error:
        if may_return:
            with contextlib.suppress(SyntaxError):
                return compile(_as_function(source), _NAME, "exec", 0, True)
        raise error


def _as_function(source: str) -> ast.Module:
    """Make a source the body of a function that is called: `return` and `nonlocal` are legal there.

    The imports that the source begins with stay outside, where `*` is legal. Names that a function
    in the source declares global are global in the body too.
    """
    tree = ast.parse(source, _NAME)
    places = (i for i, line in enumerate(tree.body) if not _is_import(line))
    start = next(places, len(tree.body))
    declared = [node.names for node in ast.walk(tree) if isinstance(node, ast.Global)]
    shared = sorted({name for names in declared for name in names})
    frame = ast.parse(f"def {_BODY}():\n  pass\n{_BODY}()")
    function: Any = frame.body[0]
    function.body = [ast.Global(shared)] * bool(shared) + tree.body[start:]
    tree.body[start:] = frame.body
    return ast.fix_missing_locations(tree)


def _is_import(line: ast.stmt) -> bool:
    docstring = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return docstring or isinstance(line, ast.Import | ast.ImportFrom)


def _exit_status(error: SystemExit) -> int:
    """What Python would make of `sys.exit(code)`."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def _finish(module: types.ModuleType, status: int) -> NoReturn:
    """End as the interpreter would, but without taking all its modules apart, which takes time.

    It waits for threads, runs exit handlers, drops the program's globals (so that open files among
    them are written), and flushes.
    """
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for name in list(vars(module)):
            if name != "__builtins__":
                vars(module)[name] = None
        gc.collect()
        for stream in (sys.stdout, sys.__stdout__, sys.stderr):
            if stream is not None and not stream.closed:
                stream.flush()
    except BaseException:
        status = status or 120  # Python's own status for output that cannot be written
    finally:
        os._exit(status)


def _call(module: types.ModuleType, fn_name: str, arguments: list[Any]) -> None:
    """Call the function and report what it returned."""
    function = getattr(module, fn_name, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), fn_name, None)
    if function is None:
        raise NameError(f"the program defines no function {fn_name}")
    result = function(*arguments)
    try:
        text = value_json.dumps(result)
    except (TypeError, ValueError, RecursionError) as error:
        report(f"unreadable {error}")
    else:
        report(f"result {text}")


def _report_failure(error: BaseException) -> None:
    if isinstance(error, MemoryError):
        report("memory")
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != _NAME:
        trace = trace.tb_next  # leave out the judge's own frames
    traceback.print_exception(type(error), error, trace, limit=20)


def _thread_failed(arguments: threading.ExceptHookArgs) -> None:
    if issubclass(arguments.exc_type, MemoryError):
        report("memory")
    threading.__excepthook__(arguments)


def _fresh_streams() -> None:
    """Open the standard streams anew, because the parent's streams hold what it has read."""
    streams: Any = sys  # the names are read-only to a type checker
    streams.stdin = streams.__stdin__ = _builtin_open(0, encoding="utf-8", closefd=False)
    streams.stdout = streams.__stdout__ = _builtin_open(1, "w", encoding="utf-8", closefd=False)
    streams.stderr = streams.__stderr__ = _builtin_open(
        2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False
    )
    builtins.__dict__["open"] = _open


_builtin_open: Final[Any] = builtins.open


@functools.wraps(builtins.open)
def _open(file: Any, *arguments: Any, **keywords: Any) -> Any:
    # Without /proc this link leads nowhere, but some honest programs read their input by this name.
    if isinstance(file, str) and file == "/dev/stdin":
        file = os.dup(0)
    return _builtin_open(file, *arguments, **keywords)
