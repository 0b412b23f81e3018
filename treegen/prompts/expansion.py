"""The levels that a prompt tree generates below a node, and their size bounds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import zip_longest
from typing import Any, Final, Literal

from treegen.common.params import SamplingParams
from treegen.errors import InputError, TreeError

# Equal to `treegen.search.Evaluate`, which this package cannot import because search is above it.
Scorer = Callable[[Sequence[Any]], Awaitable[Sequence[float]]]

ScorerName = Literal["mean_logprob", "min_logprob", "sum_logprob"]
SCORERS: Final[tuple[ScorerName, ...]] = ("mean_logprob", "min_logprob", "sum_logprob")


@dataclass(frozen=True, slots=True)
class Expand:
    """One generated level: continuations of every node of the level above.

    A stop string stays in the text, so that the next level continues after it. A parameter that is
    None takes the run's value.

    Raises:
        TreeError: a field has a value that cannot be used.
    """

    samples: int
    """Continuations of each node above."""
    _: KW_ONLY
    stop: str | Sequence[str] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    prefix: str = ""
    """Text that is appended to each node above before its continuations are drawn."""
    keep: int | None = None
    """Nodes of this level, over all parents, that are expanded further; None expands all."""
    scorer: ScorerName | Scorer | None = None
    """The score by which `keep` selects: one of SCORERS, or a function as in
    treegen.search.evaluate. Default: mean_logprob."""

    def __post_init__(self) -> None:
        for name in ("samples", "keep"):
            count = getattr(self, name)
            if count is None and name == "keep":
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise TreeError(f"{name} of a level must be an integer >= 1, got {count!r}")
        try:
            params = SamplingParams(**self.overrides)
        except InputError as error:
            raise TreeError(
                f"the sampling parameters of a generated level are not valid: {error}"
            ) from None
        if params.temperature == 0 and self.samples > 1:
            raise TreeError("temperature 0 produces the same text for every sample; use samples=1")
        if not isinstance(self.prefix, str):
            raise TreeError(
                f"prefix must be a string, got {type(self.prefix).__name__}; pass the text before "
                "the continuations"
            )
        if isinstance(self.scorer, str) and self.scorer not in SCORERS:
            raise TreeError(f"scorer must be one of {', '.join(SCORERS)}, got {self.scorer!r}")
        if (
            self.scorer is not None
            and not isinstance(self.scorer, str)
            and not callable(self.scorer)
        ):
            raise TreeError(
                f"scorer must be a name or a function, got {type(self.scorer).__name__}"
            )

    @property
    def overrides(self) -> dict[str, Any]:
        """The sampling parameters that differ from those of the run."""
        values = {name: getattr(self, name) for name in ("stop", "max_tokens", "temperature")}
        return {name: value for name, value in values.items() if value is not None} | {
            "include_stop": True
        }


@dataclass(frozen=True, slots=True)
class LevelBound:
    """Upper bounds of the size of one generated level."""

    level: int
    """Its number, from 1."""
    rows: int
    """Maximum number of samples."""
    kept: int
    """Maximum number of samples that are expanded further."""
    tokens: int
    """Maximum number of generated tokens."""


_SUMMED: Final = ("rows", "kept", "tokens")


def bound_levels(levels: Sequence[Expand], params: SamplingParams) -> list[LevelBound]:
    """Return size bounds of the levels below one node, level by level.

    Args:
        levels: The levels to generate, in order.
        params: The parameters of the run.

    Raises:
        TreeError: a level draws several continuations at temperature 0, which would all be equal.
    """
    bounds = []
    above = 1
    for number, level in enumerate(levels, start=1):
        if level.samples > 1 and level.temperature is None and params.temperature == 0:
            raise TreeError(
                f"generated level {number} draws {level.samples} continuations, which are all "
                "identical at temperature 0; set a temperature above 0 for the level, or use "
                "samples=1"
            )
        rows = above * level.samples
        above = rows if level.keep is None else min(rows, level.keep)
        bounds.append(
            LevelBound(number, rows, above, rows * (level.max_tokens or params.max_tokens))
        )
    return bounds


def sum_levels(trees: Sequence[Sequence[Expand]], params: SamplingParams) -> tuple[LevelBound, ...]:
    """Return the sums of the size bounds below several nodes, level by level.

    Args:
        trees: The levels below each node.
        params: The parameters of the run.
    """
    bounds = [bound_levels(levels, params) for levels in trees]
    total = []
    for number, level in enumerate(zip_longest(*bounds), start=1):
        present = [bound for bound in level if bound is not None]
        sums = [sum(getattr(bound, name) for bound in present) for name in _SUMMED]
        total.append(LevelBound(number, *sums))
    return tuple(total)
