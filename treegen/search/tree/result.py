"""Problems to search, the outcome that a strategy returns, and the result that is stored."""

from __future__ import annotations

import ast
import asyncio
import os
import sysconfig
import warnings
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Final

from treegen.errors import DataError, InputError
from treegen.prompts.tree import as_list
from treegen.search.budget import BudgetIgnored, BudgetReached, SearchUsage, StopReason
from treegen.search.tree.node import Search, SearchNode
from treegen.search.tree.records import NodeRecord, SearchTree, as_json, round_value

_LIBRARIES: Final = tuple(
    os.path.join(sysconfig.get_path(name), "")
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)
"""The folders of Python's own modules and of installed packages."""


@dataclass(frozen=True, slots=True)
class SearchProblem:
    """A prompt to search from, as text or token ids. The seeds of a search follow from its name."""

    name: str
    """Unique in a run."""
    content: str | Sequence[int]
    """The prompt."""
    is_named: bool
    """Whether the user gave the name. If not, the seeds of the search follow from its prompt."""
    origin: str | None = None
    """For an unnamed problem, the text that its seeds follow from; None if not known yet."""


def name_problems(
    problems: Iterable[Any], flat: Callable[[Any], str | Sequence[int]]
) -> list[SearchProblem]:
    """Return problems with their given names; a problem without a name gets its number.

    Args:
        problems: Prompts, (name, prompt) pairs, or SearchProblems, which are kept unchanged.
        flat: Returns the text or token ids of a prompt.

    Raises:
        InputError: Two problems have the same name.
    """
    named = []
    for index, problem in enumerate(as_list("problems", problems)):
        if isinstance(problem, SearchProblem):
            named.append(problem)
            continue
        is_pair = isinstance(problem, tuple) and len(problem) == 2 and isinstance(problem[0], str)
        name, content = problem if is_pair else (str(index), problem)
        named.append(SearchProblem(name, flat(content), is_pair))
    for name, times in Counter(problem.name for problem in named).items():
        if times > 1:
            raise InputError(f"two problems are named {name!r}; names must be unique")
    return named


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """The return value of a strategy."""

    best: SearchNode | None
    """The best candidate; if there is none, the best unfinished node."""
    candidates: tuple[SearchNode, ...] = ()
    """Finished solutions, best first."""
    answers: tuple[str | None, ...] = ()
    """The answer of each candidate, if answers were read; None for a candidate without one."""
    votes: Mapping[str, float] = field(default_factory=dict)
    """Answer -> votes, in the order in which the answers were first given."""
    stopped: str = ""
    """Why it ended early; "" if it did not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """One finished, stopped or failed search, detached from the caches that it used."""

    name: str
    """Name of the problem."""
    tree: SearchTree
    """All nodes."""
    best: int | None = None
    """Id of the best node of the tree."""
    candidates: tuple[int, ...] = ()
    """Ids of the candidate nodes of the tree."""
    answers: tuple[str | None, ...] = ()
    """As in `SearchOutcome`."""
    votes: Mapping[str, float] = field(default_factory=dict)
    """As in `SearchOutcome`."""
    usage: SearchUsage = field(default_factory=SearchUsage)
    """What the search cost."""
    stopped: str = ""
    """As in `SearchOutcome`."""
    stopped_by: StopReason | None = None
    """What ended it early, for programs; None if nothing did. It is not stored."""
    error: str | None = None
    """The failure that ended it, in one line, with the place in the user's own code, if the error
    passed through it, such as "(mine.py:6, in astar)"; None if the search did not fail."""
    value: object = None
    """What the search function returned, if that was no SearchOutcome, node or list of nodes."""
    exception: BaseException | None = field(default=None, repr=False, compare=False)
    """The failure itself, with a traceback without variables. It is not stored."""

    @property
    def best_text(self) -> str | None:
        """Text after the prompt up to the best node; None if there is no best node."""
        return None if self.best is None else self.tree.path_text(self.best)

    @property
    def answer(self) -> str | None:
        """The winning answer, the first of several; without votes, the best candidate's answer."""
        if self.votes:
            return max(self.votes, key=lambda answer: self.votes[answer])
        return self.answers[0] if self.answers else None

    def __repr__(self) -> str:
        answer = f", answer {self.answer!r:.40}" if self.answer is not None else ""
        ended = f", {self.error or self.stopped}" if self.error or self.stopped else ""
        cost = f"{self.usage.tokens_decoded:,} tokens"
        return f"SearchResult({self.name!r}: {len(self.tree.nodes):,} nodes, {cost}{answer}{ended})"

    def _repr_svg_(self) -> str:
        return self.tree.to_svg(self.best)

    @staticmethod
    def of(search: Search, returned: object, error: BaseException | None) -> SearchResult:
        """Return the result of a search whose function returned or raised something.

        A search that returns nodes of another tree has failed.

        Args:
            search: The search.
            returned: What its function returned; None if it raised an error.
            error: What its function raised; None if nothing.
        """
        nodes = search.nodes()
        ids = {node: index for index, node in enumerate(nodes)}
        outcome: SearchOutcome | None = None
        try:
            outcome = to_outcome(returned)
            _check_own(outcome, ids)
        except InputError as wrong:
            error, outcome, returned = wrong, None, None
        found = outcome or SearchOutcome(None)
        stopped = found.stopped
        stopped_by = search.stopped.by if search.stopped else None
        if isinstance(error, BudgetReached | BudgetIgnored):
            stopped_by = stopped_by or getattr(error, "by", StopReason.BUDGET)
            stopped, error = str(error), None
        elif error is not None and stopped_by is not StopReason.INTERRUPTED:
            stopped_by = StopReason.FAILED
        return SearchResult(
            name=search.name,
            tree=SearchTree.of(nodes),
            best=None if found.best is None else ids[found.best],
            candidates=tuple(ids[node] for node in found.candidates),
            answers=found.answers,
            votes=dict(found.votes),
            usage=replace(search.usage, seconds=search.usage.elapsed_seconds()),
            stopped=stopped,
            stopped_by=stopped_by,
            error=None if error is None else _describe(error),
            value=None if outcome else returned,
            exception=None if error is None else detach(error),
        )

    @staticmethod
    def make_skipped(problem: SearchProblem, reason: str) -> SearchResult:
        """Return the record of a search that was given up before it produced anything.

        Args:
            problem: The problem of the search.
            reason: Why it was given up.
        """
        text = problem.content if isinstance(problem.content, str) else ""
        root = NodeRecord(0, None, 0, text, None, 0.0, 0, False, False, "given")
        return SearchResult(
            name=problem.name,
            tree=SearchTree((root,)),
            error=reason,
            stopped=StopReason.LEFT_OUT.value,
            stopped_by=StopReason.LEFT_OUT,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # The exception is left out, because its class may be one that cannot be pickled.
        names = [attribute.name for attribute in fields(self) if attribute.name != "exception"]
        return partial(SearchResult, **{name: getattr(self, name) for name in names}), ()

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON object; values that JSON cannot hold become their repr."""
        record = {name: getattr(self, name) for name in ("name", "best", "stopped", "error")}
        usage = asdict(self.usage)
        del usage["started"]
        if not self.usage.actions:  # as in searches without an environment
            del usage["actions"]
        return {
            **record,
            "candidates": list(self.candidates),
            "answers": list(self.answers),
            "votes": {answer: round_value(votes) for answer, votes in self.votes.items()},
            "value": as_json(self.value),
            "usage": usage,
            "nodes": [node.to_json() for node in self.tree.nodes],
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> SearchResult:
        """Return the result from a record of `to_json`; raises DataError for any other record."""
        try:
            return SearchResult(
                name=record["name"],
                tree=SearchTree.from_json(record["nodes"]),
                best=record["best"],
                candidates=tuple(record["candidates"]),
                answers=tuple(record["answers"]),
                votes=dict(record["votes"]),
                usage=SearchUsage(**record["usage"]),
                stopped=record["stopped"],
                error=record["error"],
                value=record["value"],
            )
        except (KeyError, TypeError) as error:
            raise DataError(
                f"the record of a search cannot be read: {error!r}; restore the record from a copy"
            ) from None


def warn_if_all_failed(results: Sequence[SearchResult], *, stacklevel: int = 3) -> None:
    """Warn if all searches failed, with the failure of the first."""
    if results and all(result.error is not None for result in results):
        first = results[0]
        more = " (its exception and traceback are in result.exception)" if first.exception else ""
        failed = (
            "the only search failed; its error"
            if len(results) == 1
            else f"all {len(results):,} searches failed; the first error"
        )
        warnings.warn(
            f"{failed}: {first.error}{more}",
            RuntimeWarning,
            stacklevel=stacklevel,
        )


def to_outcome(returned: object) -> SearchOutcome | None:
    """Convert the return value of a search to an outcome; return None for other values.

    Raises:
        InputError: The value is a call that was not awaited, or a sequence of nodes and other
            things.
    """
    if isinstance(returned, Coroutine) or asyncio.isfuture(returned):
        if isinstance(returned, Coroutine):
            returned.close()
        raise InputError(
            f"a search returned a call without its result ({type(returned).__name__}); use `return "
            "await ...`"
        )
    if returned is None or isinstance(returned, SearchOutcome):
        return returned or SearchOutcome(None)
    if isinstance(returned, SearchNode):
        return SearchOutcome(returned, (returned,))
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        are_nodes = [isinstance(item, SearchNode) for item in returned]
        if returned and all(are_nodes):
            return SearchOutcome(returned[0], tuple(returned))
        if any(are_nodes):
            kinds = ", ".join(dict.fromkeys(type(item).__name__ for item in returned))
            raise InputError(
                f"a search returned a {type(returned).__name__} of {kinds}; return only nodes, "
                "the best first, or a SearchOutcome, and store other data of a node in its "
                "value or data"
            )
    return None


def _check_own(outcome: SearchOutcome | None, ids: Mapping[SearchNode, int]) -> None:
    """Raise InputError if `outcome` has anything but nodes of the search's own tree."""
    if outcome is None:
        return
    best = () if outcome.best is None else (outcome.best,)
    for node in (*best, *outcome.candidates):
        if not isinstance(node, SearchNode):
            raise InputError(
                f"a SearchOutcome must contain only nodes of the search, got {node!r:.80}"
            )
        if node not in ids:
            raise InputError(
                f"a search returned node {node.key!r}, which is not in its tree; return only nodes "
                "below the root of the search, not nodes of other searches or of prompts made with "
                "`prompt`"
            )


def _describe(error: BaseException) -> str:
    """Return an error in one line, with its place in the user's own code."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}{': ' if text else ''}{text}"
    return line[:300] + _locate_in_user_code(error)


def _locate_in_user_code(error: BaseException) -> str:
    """Return the innermost location of an error in the user's code, such as " (mine.py:6, in f)".

    Code of treegen, of installed packages and of Python is not the user's own. The result is "" if
    the error passed through no other code.
    """
    location = ""
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        is_library = (
            module.partition(".")[0] == "treegen"
            or code.co_filename.startswith("<frozen ")
            or code.co_filename.startswith(_LIBRARIES)
        )
        if not is_library:
            location = (
                f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno}, in {code.co_name})"
            )
        trace = trace.tb_next
    return location


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
        current = todo.pop()
        if current is None or any(current is other for other in seen):
            continue
        seen.append(current)
        current.__traceback__ = _copy_traceback(current.__traceback__)
        todo += [current.__cause__, current.__context__]
        if isinstance(current, BaseExceptionGroup):
            todo += current.exceptions
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
    positions = list(code.co_positions())
    at = entry.tb_lasti // 2
    position = positions[at] if 0 <= at < len(positions) else (None,) * 4
    line, end_line, column, end_column = position
    # A generator has a frame before it runs, and that frame has no caller.
    module = ast.parse("def frame(): yield", code.co_filename)
    for node in ast.walk(module):
        if isinstance(node, ast.stmt | ast.expr):
            node.lineno, node.end_lineno = line or entry.tb_lineno or 1, end_line
            node.col_offset, node.end_col_offset = column or 0, end_column
    constants = compile(module, code.co_filename, "exec").co_consts
    frame_code = next(constant for constant in constants if isinstance(constant, CodeType))
    frame_code = frame_code.replace(co_name=code.co_name, co_qualname=code.co_qualname)
    # By these names Python finds the source of modules that are not files.
    names = {name: frame.f_globals.get(name) for name in ("__name__", "__loader__", "__spec__")}
    instruction = next(
        (i for i, item in enumerate(frame_code.co_positions()) if item == position), -1
    )
    return FunctionType(frame_code, names)().gi_frame, 2 * instruction
