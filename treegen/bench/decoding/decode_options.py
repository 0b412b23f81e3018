"""The options of `treegen bench decode`: valid combinations, and the cases that they select.

Needs no torch, so that invalid combinations are rejected at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from treegen.bench.decoding.decode import decode_cases, grid_cases
from treegen.bench.decoding.modes import (
    ALONE,
    DECODE_MODES,
    GRID_SECONDS,
    OWN_STATES,
    SECONDS,
    STRUCTURED,
)
from treegen.bench.decoding.workloads import Case
from treegen.bench.vision import check_alone
from treegen.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeOptions:
    """The options that select what is decoded; None or empty if not set."""

    rows: list[int] | None
    prefix: list[int] | None
    problems: int
    problem_tokens: int
    new_tokens: int | None
    modes: tuple[str, ...] | None
    grid: bool
    refill: bool
    against: tuple[str, ...]
    own_states: bool
    structured: bool
    speculate: bool
    own_tokens: int
    trace: str | None

    def check(
        self, *, image_tokens: int, quantization: str | None, ranks: int, model: str | None
    ) -> None:
        """Raise InputError for options that would have no effect in combination.

        Args:
            image_tokens: Tokens of an image before each prefix; 0 for no image.
            quantization: Quantisation of the weights, if any.
            ranks: GPUs that compute together.
            model: A checkpoint, if one is used.
        """
        check_alone(
            image_tokens,
            grid=self.grid,
            refill=self.refill,
            speculate=self.speculate,
            against=self.against,
            structured=self.structured,
            quantization=quantization,
            tp=ranks > 1,
        )
        several = self.problem_tokens or self.problems != 1
        if self.speculate:
            others = self.grid or self.refill or self.against or self.modes or self.new_tokens
            if others or several:
                raise InputError(
                    "--speculate takes --rows, --prefix, --own-tokens and --trace; leave others out"
                )
            return
        if self.own_tokens or self.trace:
            raise InputError("--own-tokens and --trace are for --speculate; give it too")
        if self.modes == ():
            raise InputError(f"--modes is empty; it takes some of {', '.join(DECODE_MODES)}")
        if self.own_states and (self.grid or ranks > 1):
            raise InputError("--own-states is for one GPU, and not for --grid; leave one out")
        if self.structured and (self.grid or self.refill):
            raise InputError("--structured is not for --grid, and not for --refill; leave one out")
        if self.grid and (several or self.against or self.modes):
            raise InputError(
                "--grid has modes of its own, no --problems, and no engines --against it; "
                "leave them out"
            )
        if self.refill and (self.grid or self.against or model):
            raise InputError(
                "--refill takes random weights; leave --model, --grid and --against out"
            )

    @property
    def seconds(self) -> float:
        """The default time limit; runs whose least time is longer are skipped."""
        return GRID_SECONDS if self.grid else SECONDS

    def cases(self, ranks: int) -> list[Case]:
        """Return the cases to run. ranks: GPUs that compute together."""
        if self.grid:
            rows = self.rows or [1, 4, 16, 64, 256, 1024, 4096]
            prefixes = self.prefix or [64, 256, 1024, 4096, 16384]
            return grid_cases(rows, prefixes, self.new_tokens or 16)
        possible = [mode for mode in DECODE_MODES if ranks == 1 or mode not in ALONE]
        more = (*[OWN_STATES] * self.own_states, *[STRUCTURED] * self.structured, *self.against)
        return decode_cases(
            self.rows or [1024],
            self.prefix or [2048],
            self.new_tokens or 64,
            problems=self.problems,
            problem_tokens=self.problem_tokens,
            modes=self.modes or possible,
            against=more,
            refill=self.refill,
        )
