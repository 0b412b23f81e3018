"""Early stopping: of problems whose vote is decided, and of samples with low confidence.

The samples of a problem are drawn in rounds of fixed sizes. After each round the rule reads the
problem's samples so far, in the order of their indices, whatever order they ended in. So the set of
samples is a function of the samples themselves: an early-stopped run has exactly the first samples
of the full run, problem by problem, and a resumed run derives its state from the stored samples.

Stopping when an answer leads is optional stopping: the share of correct samples among all that were
drawn is biased, and so is their pass@k. The first round is always drawn. So metrics of single
samples use the first round, and only the vote uses all samples.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from treegen.evals.config.eval_settings import EvalSettings
from treegen.evals.config.stop_rule import DECIDED, parse_stop_rule
from treegen.evals.statistics.confidence import STOPPED
from treegen.search.strategies.majority import is_decided


@dataclass(slots=True)
class _State:
    """The state of one problem: its samples' answers by index, and its rounds."""

    answers: dict[int, str | None] = field(default_factory=dict)
    lowest: dict[int, float] = field(default_factory=dict)
    num_low_confidence: int = 0
    """Samples that ended because of low confidence."""
    end: int = 0
    """Samples with lower indices are drawn, or being drawn."""
    num_voters: int = 0
    """The samples of complete rounds are those with lower indices."""
    stop_reason: str = ""
    """Why no more samples are drawn: "decided" or "all drawn"; "" if more may be."""


class Rounds:
    """Decides which samples of each problem to draw next, and which need not be drawn at all.

    Attributes:
        num_not_drawn: The number of planned samples that need not be drawn.
    """

    def __init__(
        self,
        settings: EvalSettings,
        problem_ids: Sequence[str],
        representatives: Callable[[Collection[str]], Mapping[str, str]] | None = None,
    ) -> None:
        """Start without samples.

        Args:
            settings: The settings by which the run stops.
            problem_ids: The ids of all problems.
            representatives: Maps answers that may be equal without being equal strings to their
                representatives, see `AnswerType`; by default only equal strings are equal.
        """
        self._settings = settings
        self._num = settings.num_samples
        self._first_round = settings.first_round
        self._representatives = representatives
        self._chance = parse_stop_rule(settings.stop_when)
        self._states = {problem_id: _State() for problem_id in problem_ids}
        self._changed = dict.fromkeys(problem_ids)  # problems to check for a next round
        self.num_not_drawn = 0  # a running sum, because it is read in every decode step

    @property
    def reads_answers(self) -> bool:
        """Whether `add` needs the answers of samples."""
        return self._chance is not None

    def add(self, record: Mapping[str, Any], answer: str | None) -> None:
        """Add a finished sample.

        Args:
            record: The sample's line of samples.jsonl.
            answer: The sample's answer by the task's first filter; None if it has none.
        """
        problem_id, index = record["problem_id"], record["sample_index"]
        state = self._states[problem_id]
        low_confidence = record["finish_reason"] == STOPPED
        self.num_not_drawn -= bool(state.stop_reason) and index not in state.answers
        state.answers[index] = None if low_confidence else answer
        state.num_low_confidence += low_confidence
        if confidence := record.get("confidence"):
            state.lowest[index] = confidence["lowest"]
        self._changed[problem_id] = None

    def begin(self) -> None:
        """Let `take_due` return the missing samples of rounds in progress once more."""
        for problem_id, state in self._states.items():
            if not state.stop_reason:
                state.end = 0
                self._changed[problem_id] = None

    def take_due(self) -> list[tuple[str, list[int]]]:
        """Return the samples to draw now as problems and indices; each sample is returned once."""
        due = []
        for problem_id in self._changed:
            state = self._states[problem_id]
            indices = self._next_round(state)
            if indices:
                due.append((problem_id, indices))
        self._changed = {}
        return due

    def _next_round(self, state: _State) -> list[int]:
        indices: list[int] = []
        while not indices and not state.stop_reason:
            if any(index not in state.answers for index in range(state.end)):
                return []  # the round is still being drawn
            state.num_voters = state.end
            if state.end and self._is_decided(state):
                state.stop_reason = DECIDED
            elif state.end >= self._num:
                state.stop_reason = "all drawn"
            else:
                start, state.end = state.end, self._end_after(state.end)
                indices = [i for i in range(start, state.end) if i not in state.answers]
            if state.stop_reason:
                self.num_not_drawn += self._num - len(state.answers)
        return indices

    def _end_after(self, end: int) -> int:
        """Return the end of the round that starts at an index."""
        if not end:
            return self._first_round
        step = self._settings.stop_batch if self._chance is not None else self._num
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
        """Return the confidence floor of a problem's samples drawn now; None if there is none."""
        state, confidence = self._states[problem_id], self._settings.confidence
        if confidence is None or confidence.keep is None:
            return None
        warmup = range(self._first_round)
        if state.end <= len(warmup) or any(i not in state.answers for i in warmup):
            return None
        lowest = [state.lowest[i] for i in warmup if i in state.lowest]
        return confidence.floor(lowest) if lowest else None

    def to_json(self) -> dict[str, Any]:
        """Return the rules by which the run stops, and where each problem did, as JSON values.

        The samples of a problem are its voters: the samples of complete rounds. docs/runs.md
        defines the fields, whose names stay as they are, so that old runs stay equal to the byte.
        """
        problems = {}
        for problem_id, state in self._states.items():
            row: dict[str, Any] = {
                "samples": state.num_voters,
                "why": state.stop_reason or "under way",
            }
            if (floor := self.floor(problem_id)) is not None:
                row |= {"unsure": state.num_low_confidence, "floor": floor}
            problems[problem_id] = row
        settings = self._settings
        return {
            "stop_when": settings.stop_when,
            "stop_batch": settings.stop_batch,
            "first_round": self._first_round,
            "confidence": asdict(settings.confidence) if settings.confidence else None,
            "spared": self.num_not_drawn,
            "problems": problems,
        }

    def voters(self) -> dict[str, int]:
        """Return how many samples vote, from the first on, for each problem that has stopped."""
        return {name: state.num_voters for name, state in self._states.items() if state.stop_reason}
