"""Simulated judgements whose true mean is known, to count how often intervals have it."""

from dataclasses import dataclass

import numpy as np

from treegen.evals.judging.components import Cells
from treegen.evals.judging.interval import mean_of


@dataclass(frozen=True)
class Case:
    """A design, and how its judgements vary.

    spread: of problems' means. judge, wording: sizes of the judges' and the wordings' effects.
    kind: "chances" (expected verdicts), "verdicts" (right or wrong), or "ties" (nearly all alike).
    """

    problems: int
    answers: int
    judges: int
    wordings: int
    spread: float = 0.2
    judge: float = 0.1
    wording: float = 0.05
    kind: str = "chances"


def draw(case: Case, rng: np.random.Generator) -> tuple[Cells, float]:
    """Cells of a simulated judging, and the mean that its interval is for.

    A factor of one level is given, so its effect belongs to the mean. All effects are symmetric
    and so small that no chance leaves [0, 1].
    """
    middle = 0.95 if case.kind == "ties" else 0.5
    size = 0.1 if case.kind == "ties" else 1.0
    problem = rng.uniform(-1, 1, case.problems) * case.spread * size
    answer = rng.uniform(-1, 1, (case.problems, case.answers)) * 0.1 * size
    judge = rng.uniform(-1, 1, case.judges) * case.judge * size
    wording = rng.uniform(-1, 1, case.wordings) * case.wording * size
    mixed = rng.uniform(-1, 1, (case.problems, 1, case.judges, case.wordings)) * 0.05 * size
    p = (
        middle
        + problem[:, None, None, None]
        + answer[:, :, None, None]
        + judge[None, None, :, None]
        + wording
        + mixed
    )
    y = p if case.kind == "chances" else (rng.random(p.shape) < p).astype(np.float64)
    target = middle
    target += float(judge[0]) if case.judges == 1 else 0.0
    target += float(wording[0]) if case.wordings == 1 else 0.0
    index = np.indices(p.shape).reshape(4, -1)
    names = ("problem", "answer", "judge", "wording")
    return Cells(y.ravel(), dict(zip(names, index, strict=True))), target


def coverage(case: Case, repeats: int, seed: int = 0) -> tuple[float, float, float]:
    """How often the interval has the mean, how often the usual one does, and the mean width."""
    rng = np.random.default_rng(seed)
    hits = naive = 0
    width = 0.0
    for _ in range(repeats):
        cells, target = draw(case, rng)
        found = mean_of(cells)
        hits += found.low <= target <= found.high
        error = 1.96 * (found.naive or 0.0)
        naive += abs(found.value - target) <= error
        width += found.high - found.low
    return hits / repeats, naive / repeats, width / repeats
