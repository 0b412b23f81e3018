"""Runs one program in a confined child process, whose output cannot be trusted.

The report on descriptor 3 has one line for each stage. Lines up to "compiled" were written before
the program's first instruction. The program itself may have written later lines.
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
    """Run a program as Python runs a script, or call one of its functions. Never returns.

    Args:
        source: Source of the program.
        prelude: Source that runs first in the same namespace.
        call: Name and arguments of the function to call, as `value_json.dumps` writes them; None
            runs a script.
        may_return: Whether a source that is not a valid script may run as the body of a function.
    """
    _reopen_streams()
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
    threading.excepthook = _report_thread_failure
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
        # The source is a str, so a coding cookie in it has no effect.
        return compile(source, _NAME, "exec", 0, True)
    except SyntaxError as error:
        if may_return:
            with contextlib.suppress(SyntaxError):
                return compile(_wrap_in_function(source), _NAME, "exec", 0, True)
        raise error


def _wrap_in_function(source: str) -> ast.Module:
    """Wrap a source in a function that is called, so that `return` and `nonlocal` are legal.

    The docstring and the imports at the start of the source stay outside, where `*` is legal. Names
    that the source declares global anywhere are also global in the body.
    """
    tree = ast.parse(source, _NAME)
    indices = (i for i, line in enumerate(tree.body) if not _is_import_or_docstring(line))
    start = next(indices, len(tree.body))
    declarations = [node.names for node in ast.walk(tree) if isinstance(node, ast.Global)]
    names = sorted({name for declared in declarations for name in declared})
    wrapper = ast.parse(f"def {_BODY}():\n  pass\n{_BODY}()")
    function: Any = wrapper.body[0]
    function.body = [ast.Global(names)] * bool(names) + tree.body[start:]
    tree.body[start:] = wrapper.body
    return ast.fix_missing_locations(tree)


def _is_import_or_docstring(line: ast.stmt) -> bool:
    docstring = isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant)
    return docstring or isinstance(line, ast.Import | ast.ImportFrom)


def _exit_status(error: SystemExit) -> int:
    """Return the exit status that Python would use for `sys.exit(code)`."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    print(error.code, file=sys.stderr)  # noqa: T201
    return 1


def _finish(module: types.ModuleType, status: int) -> NoReturn:
    """End as the interpreter would, but skip its slow teardown of all modules.

    Waits for threads, runs exit handlers, drops the program's globals (which flushes open files
    among them), and flushes the streams.
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
    """Call the function and report its return value."""
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
        trace = trace.tb_next  # leave out treegen's own frames
    traceback.print_exception(type(error), error, trace, limit=20)


def _report_thread_failure(arguments: threading.ExceptHookArgs) -> None:
    if issubclass(arguments.exc_type, MemoryError):
        report("memory")
    threading.__excepthook__(arguments)


def _reopen_streams() -> None:
    """Reopen the standard streams, because the parent's streams hold buffered input."""
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
    # Without /proc this link leads nowhere, but some programs open it to read their input.
    if isinstance(file, str) and file == "/dev/stdin":
        file = os.dup(0)
    return _builtin_open(file, *arguments, **keywords)
