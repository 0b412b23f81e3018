"""A loaded run: its settings, its scored samples, its prompts, and its timeline."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treegen.common.outputs import Thinking, answer_after
from treegen.evals.problem import readable_reference
from treegen.evals.statistics.metrics import Report
from treegen.evals.verdict import Verdict
from treegen.report.trees import StoredTree
from treegen.runs.images import RunImage, RunImages

if TYPE_CHECKING:
    from treegen.evals.judging.summary import Summary
    from treegen.evals.statistics.tables import Table
    from treegen.prompts.tree import Node
    from treegen.runs.settings import RunInfo


@dataclass(slots=True)  # a frozen class takes three times as long to create, and runs have many
class Sample:
    """A finished sample.

    problem_id: the id of its problem.
    index: its number among the samples of the problem, from 0.
    num_tokens: its generated tokens.
    logprob: natural-log probability of the whole sample, if it is known.
    finish_reason: why it ended.
    verdicts: by filter; None if the sample is not scored.
    searched: whether it is the result of a search.
    thinking: where its reasoning ends; None if it has none.
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
        """The finish reason, and whether the sample ended during its reasoning."""
        cut = self.thinking is not None and not self.thinking.is_closed
        return f"{self.finish_reason} in thinking" if cut else self.finish_reason

    @property
    def parts(self) -> tuple[str, str]:
        """The text of its reasoning, tags included, and the text of its answer."""
        end = 0 if self.thinking is None else self.thinking.end
        return self.text[:end], answer_after(self.text, self.thinking)


@dataclass(frozen=True, slots=True)
class ProblemView:
    """A problem with its samples.

    question, answer: empty if the data of the run are not available.
    prompt_tokens: tokens of its whole prompt; 0 without a sample.
    samples: its finished samples.
    group: its cluster for error bars; empty for none.
    choice_tokens: tokens of its choices, which a likelihood run reads after the prompt.
    images: the images of the question.
    """

    id: str
    question: str = ""
    answer: str = ""
    prompt_tokens: int = 0
    samples: tuple[Sample, ...] = ()
    group: str = ""
    choice_tokens: int = 0
    images: tuple[RunImage, ...] = ()

    @property
    def reference(self) -> str:
        """The reference answer, for people."""
        return readable_reference(self.answer)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The current state of a run.

    source: where its problems come from.
    num_samples: the planned number of samples of each problem.
    problems: all its problems, with the samples that are finished.
    filters: the names of the filters, the headline first; empty if nothing is scored.
    report: the metrics; None if nothing is scored.
    tree: the declared prompts, if the data of the run are available.
    usage: the computation of all parts of the run.
    timeline: the progress of the run over time.
    trees: its search trees.
    notices: what is missing here and why, one sentence each.
    searched: whether its problems were searched. Each sample is then the result of a search.
    fixed: how many samples of each problem are always drawn; None except for runs with early
    stopping.
    voters: for a run with early stopping, how many samples vote, for each stopped problem.
    summaries, judged: the judgements of its samples, and the same as tables; see `treegen judge`.
    images: its images.
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
        """The unit of what is drawn for a problem, in the plural."""
        return "searches" if self.searched else "samples"

    @property
    def num_done(self) -> int:
        """The number of finished samples."""
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
            filter: The name of the filter.
            fixed: Use only samples that are always drawn, for estimates that early stopping would
                bias.
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
        kept = {problem_id: verdicts for problem_id, verdicts in every.items() if verdicts}
        self._verdicts[filter, most] = kept
        return kept


def task_name(info: "RunInfo") -> str:
    """Return the name of a run's task."""
    task = info.identity.get("task")
    return str(task.get("name", "?")) if isinstance(task, Mapping) else "run"
