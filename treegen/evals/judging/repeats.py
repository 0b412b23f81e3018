"""Scheduling of repeats: all of them, or as many as settle the majority among all."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from treegen.evals.judging.judgement_files import JudgementFile
from treegen.evals.judging.prompts import JudgedCase
from treegen.evals.judging.settings import JudgeSettings

Verdict = str | None


class RepeatScheduler:
    """Keeps the known verdicts of each case, and decides which repeats to draw next.

    Attributes:
        done: Number of stored judgements.
        planned: Number of judgements at the end; a settled case gets no further ones.
    """

    def __init__(
        self, settings: JudgeSettings, cases: Sequence[JudgedCase], lines: JudgementFile
    ) -> None:
        """Read the stored verdicts.

        Args:
            settings: Settings of judging.
            cases: All prompts of the judge run.
            lines: The stored judgements.
        """
        self._settings = settings
        self._verdicts: dict[str, dict[int, Verdict]] = {case.id: {} for case in cases}
        self._started: dict[str, set[int]] = {}
        self.done = 0
        for case in cases:
            for repeat in range(settings.repeats):
                if (case.problem_id, case.slot(repeat)) in lines.done:
                    self._verdicts[case.id][repeat] = lines.verdicts.get(
                        (case.problem_id, case.slot(repeat))
                    )
                    self.done += 1
        self.planned = sum(
            len(self._verdicts[case.id]) if self.is_decided(case) else settings.repeats
            for case in cases
        )
        self._changed = {case.id: case for case in cases if not self.is_decided(case)}

    @property
    def num_missing(self) -> int:
        """The number of missing judgements, if no further case is settled early."""
        return self.planned - self.done

    def add(self, case: JudgedCase, repeat: int, verdict: Verdict) -> None:
        """Record the verdict of a judgement that has been stored.

        Args:
            case: The prompt.
            repeat: Number of the repeat.
            verdict: The verdict; None if it is unreadable or has no choice (likelihoods).
        """
        self._verdicts[case.id][repeat] = verdict
        self.done += 1
        if self.is_decided(case):
            started = self._verdicts[case.id].keys() | self._started.get(case.id, set())
            self.planned -= self._settings.repeats - len(started)
            self._changed.pop(case.id, None)
        else:
            self._changed[case.id] = case

    def take_due(self) -> list[tuple[JudgedCase, list[int]]]:
        """Return the judgements to draw next, and mark them as started.

        Returns:
            (case, repeats) pairs.
        """
        due = []
        for case in self._changed.values():
            started = self._started.setdefault(case.id, set())
            verdicts = self._verdicts[case.id]
            if started - verdicts.keys():
                continue  # repeats that are being drawn may settle the case
            missing = [i for i in range(self._settings.repeats) if i not in verdicts]
            count = self._count_next(verdicts) if self._settings.decided else len(missing)
            started.update(missing[:count])
            if missing[:count]:
                due.append((case, missing[:count]))
        self._changed = {}
        return due

    def _count_next(self, verdicts: dict[int, Verdict]) -> int:
        """Return the smallest number of further verdicts that could settle a case."""
        first, second = _top_two(verdicts.values())
        remaining = self._settings.repeats - len(verdicts)
        return next(
            n
            for n in range(1, remaining + 1)
            if n == remaining or first + n > second + remaining - n
        )

    def is_decided(self, case: JudgedCase) -> bool:
        """Return whether a case needs no further judgements."""
        verdicts, repeats = self._verdicts[case.id], self._settings.repeats
        return len(verdicts) >= repeats or (
            self._settings.decided and is_settled(verdicts.values(), repeats - len(verdicts))
        )


def is_settled(verdicts: Collection[Verdict], remaining: int) -> bool:
    """Return whether the leading verdict stays ahead whatever the remaining verdicts are.

    Unreadable verdicts are a category like any other, so that leaving them out settles nothing.

    Args:
        verdicts: The known verdicts.
        remaining: Number of remaining verdicts.
    """
    first, second = _top_two(verdicts)
    return first > second + remaining


def majority(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the most frequent verdict; None if this is "unreadable" or there are no verdicts.

    In a tie, the verdict that was given first wins.
    """
    counts = Counter(verdicts)
    return counts.most_common(1)[0][0] if counts else None


def _top_two(verdicts: Iterable[Verdict]) -> tuple[int, int]:
    """Return how often the two most frequent verdicts were given; 0 for one that is missing."""
    first, second, *_ = *sorted(Counter(verdicts).values(), reverse=True), 0, 0
    return first, second
