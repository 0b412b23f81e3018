"""Problems whose vote is decided get no further samples, and the samples that lack confidence end.

The samples of a problem are drawn in rounds of fixed sizes. After each round one looks at the
problem's samples so far, in the order of their indices, whatever the order in which they ended. So
which samples there are is a function of the samples themselves. The samples of a run that stopped
are the first ones of the run that does not stop, problem by problem. What a stopped run is to draw
next, and why it stopped, follows from what it has stored.

Stopping when an answer leads is optional stopping: the share of right samples among all that were
drawn is biased, and so is pass@k of them. The first round is drawn whatever comes. So what is told
of single samples is of the first round, and of all samples only the vote is told.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from treegen.common.checks import check_argument_types, checked_class
from treegen.errors import InputError
from treegen.evals.statistics.confidence import STOPPED, Confidence
from treegen.search.strategies.majority import is_decided

DECIDED: Final = "decided"
NEVER: Final = "never"
_CONFIDENCE: Final = 0.95


@check_argument_types
def parse_stop_rule(rule: str) -> float | None:
    """Return the chance at which a vote is decided by a rule such as "decided:0.95".

    "decided" alone is 0.95. None for "never".

    Raises:
        InputError: it is no rule.
    """
    if rule == NEVER:
        return None
    name, colon, number = rule.partition(":")
    try:
        chance = float(number) if colon else _CONFIDENCE
    except ValueError:
        chance = -1.0
    if name != DECIDED or not 0.5 < chance < 1:
        raise InputError(
            f"stop_when must be decided, decided:CHANCE with a chance between 0.5 and 1, or "
            f"never; got {rule!r}"
        )
    return chance


@checked_class
@dataclass(frozen=True, slots=True, kw_only=True)
class StopRule:
    """By which rules a run stops.

    num_samples: most samples of a problem.
    stop_when: as `parse_stop_rule` reads it.
    batch: samples of a round but the first.
    first_round: samples of each problem that are drawn whatever comes, and whole.
    confidence: which samples end for a lack of it.
    """

    num_samples: int
    stop_when: str
    batch: int
    first_round: int
    confidence: Confidence | None


@dataclass(slots=True)
class _State:
    """One problem: its samples' answers by index, and how far its rounds are.

    end: samples with lower indices are drawn, or being drawn. over: why no more are; "" if not so.
    """

    answers: dict[int, str | None] = field(default_factory=dict)
    lowest: dict[int, float] = field(default_factory=dict)
    unsure: int = 0
    end: int = 0
    over: str = ""


class Rounds:
    """Which samples of each problem are to be drawn next, and which need not be drawn at all."""

    def __init__(
        self,
        rule: StopRule,
        problem_ids: Sequence[str],
        representatives: Callable[[Collection[str]], Mapping[str, str]] | None = None,
    ) -> None:
        """Nothing is drawn yet.

        Args:
            representatives: Of answers that may be equal without being equal strings, see
                `AnswerType`.
        """
        self._rule, self._num, self._representatives = rule, rule.num_samples, representatives
        self._chance = parse_stop_rule(rule.stop_when)
        self._states = {problem_id: _State() for problem_id in problem_ids}
        self._changed = dict.fromkeys(problem_ids)  # problems to look at

    @property
    def reads_answers(self) -> bool:
        """Whether `add` needs the answers of samples."""
        return self._chance is not None

    @property
    def spared(self) -> int:
        """Samples that were planned and need not be drawn."""
        states = self._states.values()
        return sum(self._num - len(state.answers) for state in states if state.over)

    def add(self, record: Mapping[str, Any], answer: str | None) -> None:
        """Note a finished sample. answer: by the task's first filter."""
        problem_id, index = record["problem_id"], record["sample_index"]
        state = self._states[problem_id]
        unsure = record["finish_reason"] == STOPPED
        state.answers[index] = None if unsure else answer
        state.unsure += unsure
        if found := record.get("confidence"):
            state.lowest[index] = found["lowest"]
        self._changed[problem_id] = None

    def begin(self) -> None:
        """Let all samples come that rounds under way lack, though `due` has given them before."""
        for problem_id, state in self._states.items():
            if not state.over:
                state.end = 0
                self._changed[problem_id] = None

    def take_due(self) -> list[tuple[str, list[int]]]:
        """Return the samples whose turn has come: problems and indices; each is given once."""
        found = []
        for problem_id in self._changed:
            state = self._states[problem_id]
            wanted = self._next_round(state)
            if wanted:
                found.append((problem_id, wanted))
        self._changed = {}
        return found

    def _next_round(self, state: _State) -> list[int]:
        wanted: list[int] = []
        while not wanted and not state.over:
            if any(index not in state.answers for index in range(state.end)):
                return []  # the round is under way
            if state.end and self._is_decided(state):
                state.over = DECIDED
            elif state.end >= self._num:
                state.over = "all drawn"
            else:
                start, state.end = state.end, self._end_after(state.end)
                wanted = [i for i in range(start, state.end) if i not in state.answers]
        return wanted

    def _end_after(self, end: int) -> int:
        """Return where the round ends that begins at an index."""
        if not end:
            return self._rule.first_round
        step = self._rule.batch if self._chance is not None else self._num
        return min(end + step, self._num)

    def _is_decided(self, state: _State) -> bool:
        if self._chance is None:
            return False
        voters = [state.answers[index] for index in range(state.end)]
        if self._representatives is not None:
            named = self._representatives({answer for answer in voters if answer is not None})
            voters = [None if answer is None else named[answer] for answer in voters]
        return is_decided(voters, self._chance)

    def floor(self, problem_id: str) -> float | None:
        """Return the floor of a problem's samples that are drawn now; None if they have none."""
        state, confidence = self._states[problem_id], self._rule.confidence
        if confidence is None or confidence.keep is None:
            return None
        warmup = range(self._rule.first_round)
        if state.end <= len(warmup) or any(i not in state.answers for i in warmup):
            return None
        known = [state.lowest[i] for i in warmup if i in state.lowest]
        return confidence.floor(known) if known else None

    def to_json(self) -> dict[str, Any]:
        """Return, as JSON holds it, by which rules the run stops, and where each problem did.

        The samples of a problem are its voters: those of whole rounds.
        """
        problems = {}
        for problem_id, state in self._states.items():
            row: dict[str, Any] = {"samples": state.end, "why": state.over or "under way"}
            if (floor := self.floor(problem_id)) is not None:
                row |= {"unsure": state.unsure, "floor": floor}
            problems[problem_id] = row
        rule = self._rule
        return {
            "stop_when": rule.stop_when,
            "stop_batch": rule.batch,
            "first_round": rule.first_round,
            "confidence": asdict(rule.confidence) if rule.confidence else None,
            "spared": self.spared,
            "problems": problems,
        }

    def voters(self) -> dict[str, int]:
        """Return for each problem that is over how many samples vote, from the first on."""
        return {name: state.end for name, state in self._states.items() if state.over}
