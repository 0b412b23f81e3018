"""The cases of `treegen bench decode`: one workload in every mode, or a grid.

The grid shows whether sharing ever costs more than it saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from treegen.bench.decoding.modes import DECODE_MODES
from treegen.bench.decoding.workloads import Case, Workload
from treegen.errors import InputError

if TYPE_CHECKING:
    from treegen.bench.decoding.result import WorkloadResult

REFILLS: Final = 8
NEVER_SLOWER: Final = 0.97
"""Lowest ratio of speed with sharing to speed without that noise explains."""


def decode_cases(
    rows: Sequence[int],
    prefixes: Sequence[int],
    new_tokens: int,
    *,
    problems: int = 1,
    problem_tokens: int = 0,
    modes: Sequence[str] = DECODE_MODES,
    against: Sequence[str] = (),
    refill: bool = False,
) -> list[Case]:
    """Return a case for every number of rows and every prefix, in some modes.

    Without problem tokens there is one level, so "one" and "all" are the same mode, which runs
    once.

    Args:
        rows: Numbers of rows decoded at once.
        prefixes: Lengths of the prefix, in tokens.
        new_tokens: Tokens of each sample.
        problems: Problems below the prefix, among which the rows are divided. Default: 1.
        problem_tokens: Tokens of each problem. Default: 0.
        modes: Modes to run; see `treegen.bench.decoding.modes`.
        against: Further modes, such as transformers' own engines.
        refill: Whether samples end at random, with a mean of `new_tokens` tokens, and others take
            their places. There are REFILLS times as many samples as rows. Default: False.

    Raises:
        InputError: rows cannot be divided evenly among problems.
    """
    cases = []
    if not problem_tokens:
        modes = tuple(dict.fromkeys("all" if mode == "one" else mode for mode in modes))
    for prefix in prefixes:
        for number in rows:
            if number % problems:
                raise InputError(
                    f"{number} rows cannot be divided among {problems} problems; "
                    "give --rows a multiple"
                )
            workload = Workload(
                name="refill" if refill else "decode",
                prefix=prefix,
                new_tokens=new_tokens,
                samples=number // problems * (REFILLS if refill else 1),
                problems=problems,
                problem_tokens=problem_tokens,
                max_rows=number,
                random_ends=refill,
            )
            cases.append(Case(workload, (*modes, *against)))
    return cases


def grid_cases(rows: Sequence[int], prefixes: Sequence[int], new_tokens: int) -> list[Case]:
    """Return every number of rows below every prefix, with automatic sharing and without sharing.

    Args:
        rows: Numbers of rows decoded at once.
        prefixes: Lengths of the prefix, in tokens.
        new_tokens: Tokens of each sample.
    """
    return [
        Case(
            Workload("grid", prefix=prefix, new_tokens=new_tokens, samples=number, max_rows=number),
            ("auto", "off"),
        )
        for prefix in prefixes
        for number in rows
    ]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Decode speed with automatic sharing over speed without sharing.

    shared: whether the engine chose to share; if not, both modes do the same work.
    ratio: None if one of the two modes did not run.
    """

    rows: int
    prefix: int
    shared: bool
    ratio: float | None

    @property
    def is_slower(self) -> bool:
        """Whether sharing cost more than noise."""
        return self.shared and self.ratio is not None and self.ratio < NEVER_SLOWER


def ratios(results: Sequence[WorkloadResult]) -> list[Ratio]:
    """Return the ratio of each pair of a grid's results, from their median steps, in order."""
    without = {r.workload: r for r in results if r.mode == "off"}
    found = []
    for result in results:
        if result.mode != "auto":
            continue
        shared, off = result.step_ms, without[result.workload].step_ms
        found.append(
            Ratio(
                result.rows,
                result.workload.prefix,
                bool(result.levels),
                off.median / shared.median if shared and off else None,
            )
        )
    return found
