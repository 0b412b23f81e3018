"""A run to look at: its settings, its judged samples, its prompts, and how it went."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.common.outputs import Thinking, answer_after
from treegen.evals.statistics.metrics import Report
from treegen.evals.verdict import Verdict
from treegen.report.trees import StoredTree
from treegen.runs.images import RunImage, RunImages

if TYPE_CHECKING:
    from treegen.evals.judging.summary import Summary
    from treegen.evals.statistics.tables import Table
    from treegen.prompts.tree import Node
    from treegen.runs.settings import RunInfo


@dataclass(slots=True)  # frozen ones take three times as long to make, and runs have many
class Sample:
    """One finished sample.

    problem_id: the id of its problem.
    index: its number among the samples of the problem, from 0.
    num_tokens: its generated tokens.
    logprob: natural-log probability of the whole sample, if it is known.
    finish_reason: why it ended.
    verdicts: by filter; None where the sample is not judged.
    searched: whether it is what a search found.
    thinking: where the thinking in it ends; None if it has none.
    """

    problem_id: str
    index: int
    text: str
    num_tokens: int
    logprob: float | None
    finish_reason: str
    verdicts: Mapping[str, Verdict] | None
    searched: bool = False
    thinking: Thinking | None = None

    @property
    def ended(self) -> str:
        """Why it ended, and whether that was in its thinking."""
        cut = self.thinking is not None and not self.thinking.is_closed
        return f"{self.finish_reason} in thinking" if cut else self.finish_reason

    @property
    def parts(self) -> tuple[str, str]:
        """The text of its thinking, tags included, and that of its answer."""
        end = 0 if self.thinking is None else self.thinking.end
        return self.text[:end], answer_after(self.text, self.thinking)


@dataclass(frozen=True, slots=True)
class ProblemView:
    """One problem as it was asked.

    question, answer: empty where the data of the run are not at hand.
    prompt_tokens: tokens of its whole prompt; 0 without a sample.
    samples: its finished samples.
    group: the cluster that it belongs to for error bars; empty for none.
    choice_tokens: tokens of its choices, which a run by likelihood reads after the prompt.
    images: what it asks about.
    """

    id: str
    question: str = ""
    answer: str = ""
    prompt_tokens: int = 0
    samples: tuple[Sample, ...] = ()
    group: str = ""
    choice_tokens: int = 0
    images: tuple[RunImage, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """A run as it stands.

    source: where its problems are from.
    num_samples: samples that each problem is to have.
    problems: all its problems, with the samples that are finished.
    filters: the ways in which answers were read, the headline first; empty where nothing is judged.
    report: the metrics; None where nothing is judged.
    tree: the declared prompts, where the data of the run are at hand.
    usage: what all parts of the run computed.
    timeline: how far the run was at what time.
    trees: its search trees.
    notices: what is missing here and why, one sentence each.
    searched: whether its problems were searched. The one sample of each problem is what its search
    found.
    fixed: how many samples of each problem were drawn whatever came; all but of runs that stop
    problems.
    voters: of a run that stops problems, how many samples vote of each that has stopped.
    summaries, judged: what models say of its samples, and that as tables; see `treegen judge`.
    images: the images that it has.
    """

    name: str
    path: Path
    info: "RunInfo"
    task: str
    source: str
    num_samples: int
    problems: tuple[ProblemView, ...]
    filters: tuple[str, ...] = ()
    report: Report | None = None
    tree: "Node | None" = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    timeline: Sequence[Mapping[str, Any]] = ()
    trees: tuple[StoredTree, ...] = ()
    notices: tuple[str, ...] = ()
    searched: bool = False
    fixed: int | None = None
    voters: Mapping[str, int] | None = None
    summaries: "tuple[Summary, ...]" = ()
    judged: "tuple[Table, ...]" = ()
    images: RunImages | None = None
    _verdicts: dict[tuple[str, float], Mapping[str, Sequence[Verdict]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def unit(self) -> str:
        """What is drawn for a problem, in the plural."""
        return "searches" if self.searched else "samples"

    @property
    def num_done(self) -> int:
        """Finished samples."""
        return sum(len(problem.samples) for problem in self.problems)

    @property
    def samples(self) -> Iterator[Sample]:
        """The finished samples by problem and index."""
        return chain.from_iterable([problem.samples for problem in self.problems])

    @property
    def votes(self) -> bool:
        """Whether the samples of a problem vote on its answer."""
        return self.num_samples > 1 and self.report is not None and bool(self.report.majority)

    def verdicts(self, filter: str, *, fixed: bool = False) -> Mapping[str, Sequence[Verdict]]:
        """Return the verdicts of one filter by problem; problems without any are left out.

        Args:
            fixed: Of samples that no stop depends on, for estimates that a stop would bias.
        """
        most = self.fixed if fixed and self.fixed is not None else math.inf
        if (known := self._verdicts.get((filter, most))) is not None:
            return known
        every = {
            problem.id: [
                sample.verdicts[filter]
                for sample in problem.samples
                if sample.index < most and sample.verdicts is not None and filter in sample.verdicts
            ]
            for problem in self.problems
        }
        found = {problem_id: verdicts for problem_id, verdicts in every.items() if verdicts}
        self._verdicts[filter, most] = found
        return found


def task_name(info: "RunInfo") -> str:
    """Return the name of the task that a run is of."""
    task = info.identity.get("task")
    return str(task.get("name", "?")) if isinstance(task, Mapping) else "run"
