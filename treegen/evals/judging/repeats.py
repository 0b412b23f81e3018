"""Which judgements are due: all repeats, or as many as settle the majority among all of them."""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence

from treegen.evals.judging.judgement_files import JudgementFile
from treegen.evals.judging.prompts import JudgedCase
from treegen.evals.judging.settings import JudgeSettings

Verdict = str | None


class RepeatScheduler:
    """The verdicts of each case, as far as they are known.

    done, planned: judgements that are stored, and those that there are to be in the end; a case
    that is settled takes no more than it has.
    """

    def __init__(
        self, asked: JudgeSettings, cases: Sequence[JudgedCase], lines: JudgementFile
    ) -> None:
        """Take the verdicts that are stored."""
        self._asked, self._cases = asked, cases
        self._known: dict[str, dict[int, Verdict]] = {case.id: {} for case in cases}
        self._dealt: dict[str, set[int]] = {}
        self.done = 0
        for case in cases:
            for repeat in range(asked.repeats):
                if (case.problem_id, case.slot(repeat)) in lines.done:
                    self._known[case.id][repeat] = lines.verdicts.get(
                        (case.problem_id, case.slot(repeat))
                    )
                    self.done += 1
        self.planned = sum(
            len(self._known[case.id]) if self._is_decided(case) else asked.repeats for case in cases
        )
        self._touched = {case.id: case for case in cases if not self._is_decided(case)}

    @property
    def left(self) -> int:
        """Judgements that lack, if nothing more is settled early."""
        return self.planned - self.done

    def lacks(self, case: JudgedCase) -> bool:
        """Whether more of a case is to be drawn."""
        return not self._is_decided(case)

    def add(self, case: JudgedCase, repeat: int, verdict: Verdict) -> None:
        """Take the verdict of a judgement that has been stored."""
        self._known[case.id][repeat] = verdict
        self.done += 1
        if self._is_decided(case):
            self.planned -= self._asked.repeats - len(self._known[case.id] | self._waiting(case))
            self._touched.pop(case.id, None)
        else:
            self._touched[case.id] = case

    def take_due(self) -> list[tuple[JudgedCase, list[int]]]:
        """Return what is to be drawn now, and take it as begun."""
        found = []
        for case in self._touched.values():
            begun = self._dealt.setdefault(case.id, set())
            known = self._known[case.id]
            if len(begun - known.keys()):
                continue  # what is under way may settle it
            missing = [i for i in range(self._asked.repeats) if i not in known]
            count = self._next(known) if self._asked.decided else len(missing)
            begun.update(missing[:count])
            if missing[:count]:
                found.append((case, missing[:count]))
        self._touched = {}
        return found

    def _waiting(self, case: JudgedCase) -> dict[int, Verdict]:
        return dict.fromkeys(self._dealt.get(case.id, ()))

    def _next(self, known: dict[int, Verdict]) -> int:
        """Return the fewest further verdicts that could settle a case."""
        ranked = _sort_counts(known.values())
        lead = ranked[0] if ranked else 0
        second = ranked[1] if len(ranked) > 1 else 0
        left = self._asked.repeats - len(known)
        return next(n for n in range(1, left + 1) if n == left or lead + n > second + left - n)

    def _is_decided(self, case: JudgedCase) -> bool:
        known, repeats = self._known[case.id], self._asked.repeats
        return len(known) >= repeats or (
            self._asked.decided and is_settled(known.values(), repeats - len(known))
        )


def is_settled(verdicts: Collection[Verdict], left: int) -> bool:
    """Return whether the verdict that leads is ahead of any other whatever `left` more say.

    Unreadable ones are a category as any other here, so that nothing is settled by their absence.
    """
    ranked = _sort_counts(verdicts)
    return bool(ranked) and ranked[0] > (ranked[1] if len(ranked) > 1 else 0) + left


def majority(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the one verdict that was given most often; None if it is unreadable, or there is none.

    Of several, it is the one that was given first.
    """
    counts = Counter(verdicts)
    return counts.most_common(1)[0][0] if counts else None


def _sort_counts(verdicts: Iterable[Verdict]) -> list[int]:
    return sorted(Counter(verdicts).values(), reverse=True)
