"""Tracebacks that show where an error was raised and keep no objects alive."""

from __future__ import annotations

import ast
from types import CodeType, FrameType, FunctionType, TracebackType


def detach(error: BaseException) -> BaseException:
    """Return the error with tracebacks that hold no variables, also in its causes.

    A frame keeps its variables and, by `f_back`, all frames that called it. So it keeps a search's
    session, its model, and the variables of the search's caller alive. Clearing a frame does not
    clear its callers. So each frame is replaced by a frame that never ran, with the same name and
    position.
    """
    seen: list[BaseException] = []
    todo: list[BaseException | None] = [error]
    while todo:
        each = todo.pop()
        if each is None or any(each is other for other in seen):
            continue
        seen.append(each)
        each.__traceback__ = _copy_traceback(each.__traceback__)
        todo += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            todo += each.exceptions
    return error


def _copy_traceback(trace: TracebackType | None) -> TracebackType | None:
    entries = []
    while trace is not None:
        entries.append(trace)
        trace = trace.tb_next
    copy: TracebackType | None = None
    for entry in reversed(entries):
        frame, instruction = _frame(entry)
        copy = TracebackType(copy, frame, instruction, entry.tb_lineno)
    return copy


def _frame(entry: TracebackType) -> tuple[FrameType, int]:
    """Return a new frame for an entry of a traceback, and the instruction at its position."""
    frame, code = entry.tb_frame, entry.tb_frame.f_code
    places = list(code.co_positions())
    at = entry.tb_lasti // 2
    place = places[at] if 0 <= at < len(places) else (None,) * 4
    line, end_line, column, end_column = place
    # A generator has a frame before it runs, and that frame has no caller.
    module = ast.parse("def frame(): yield", code.co_filename)
    for node in ast.walk(module):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno, node.end_lineno = line or entry.tb_lineno or 1, end_line
            node.col_offset, node.end_col_offset = column or 0, end_column
    (frame_code,) = (
        const
        for const in compile(module, code.co_filename, "exec").co_consts
        if isinstance(const, CodeType)
    )
    frame_code = frame_code.replace(co_name=code.co_name, co_qualname=code.co_qualname)
    # By these names Python finds the source of modules that are not files.
    known = {name: frame.f_globals.get(name) for name in ("__name__", "__loader__", "__spec__")}
    instruction = next((i for i, each in enumerate(frame_code.co_positions()) if each == place), -1)
    return FunctionType(frame_code, known)().gi_frame, 2 * instruction
