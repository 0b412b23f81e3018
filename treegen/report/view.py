"""A loaded run: its settings, scored samples, prompts, timeline and search trees."""

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.outputs import Thinking, answer_after
from treegen.errors import Message, RunError, TreegenError
from treegen.evals.problem import Problem, readable_reference
from treegen.evals.statistics.metrics import Report
from treegen.evals.verdict import Verdict
from treegen.runs import Key, RecordFile, RunDir, SearchRunDir
from treegen.runs.images import RunImage, RunImages
from treegen.runs.record_format import Types, check_types
from treegen.search.tree.graphs import to_dot, to_mermaid, to_svg
from treegen.search.tree.records import TreeNode, best_path

if TYPE_CHECKING:
    from rich.tree import Tree

    from treegen.evals.job import Job
    from treegen.evals.judging.summary import Summary
    from treegen.evals.statistics.tables import Table
    from treegen.prompts.tree import Node
    from treegen.runs.settings import RunInfo

FILE: Final = "trees.jsonl"
"""The file of the searches of a run, with a record for each search."""
_NONE: Final = type(None)
_SAMPLING: Final[Types] = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), (int, float, _NONE)),
    **dict.fromkeys(("top_k", "max_tokens", "seed"), (int, _NONE)),
    "stop": (list, _NONE),
}
# Types of the settings that reports read, by the name of their group.
_SETTINGS: Final[Mapping[str, Types]] = {
    "task": {"name": (str,), "version": (str,)},
    "data": {},
    "sampling": _SAMPLING,
    "draw": _SAMPLING,
    "prompt": {"system_instruction": (str, _NONE)},
    "search": {"method": (str,)},
    "budget": {
        **dict.fromkeys(("tokens", "calls", "nodes", "actions"), (int, _NONE)),
        "seconds": (int, float, _NONE),
    },
}
_REQUIRED_FIELDS: Final = ("depth", "text", "logprob", "n_tokens", "pruned")


@dataclass(frozen=True, slots=True)
class StoredTree:
    """A finished search, as its record stores it."""

    problem_id: str
    """The id of its problem."""
    method: str
    """The name of the search method."""
    solved: bool | None
    """Whether its answer is correct; None if that is not known."""
    answer: str | None
    """The answer that it found, if any."""
    best: int | None
    """The id of the node where the best path ends, if there is one."""
    nodes: tuple[TreeNode, ...]
    """The nodes of its tree, parents before their children."""
    stopped: str = ""
    """Why it ended."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """The cost of the search, such as tokens and calls, by name."""
    repeat: int = 0
    """Its index among the searches of the problem, from 0."""
    error: str = ""
    """The error with which it failed; empty if it did not fail."""
    is_finished: bool = True
    """Whether the best path is a whole solution, right or wrong. If no solution was finished, the
    best path ends at the unfinished node with the highest rank."""

    @property
    def marked(self) -> int | None:
        """The id of the last node of the path that drawings mark; None without a whole solution."""
        return self.best if self.is_finished else None

    @property
    def num_tokens(self) -> int:
        """The number of generated tokens; with evaluations of states, if the record has them."""
        num_decoded = self.usage.get("tokens_decoded")
        return (
            sum(node["n_tokens"] or 0 for node in self.nodes)
            if num_decoded is None
            else int(num_decoded)
        )

    def draw(self, *, full: bool = False) -> "Tree":
        """Return a tree for rich to print; the best path is marked if it is a whole solution.

        Args:
            full: Whether a node may take several lines; otherwise each is one line, cut at the
                width of the terminal.
        """
        from treegen.search.tree.records import draw_tree

        return draw_tree(self.nodes, self.marked, full=full)

    def to_dot(self) -> str:
        """Return the tree in the language of Graphviz."""
        return to_dot(self.nodes, best_path(self.nodes, self.marked), self.problem_id)

    def to_mermaid(self) -> str:
        """Return the tree as a Mermaid flowchart."""
        return to_mermaid(self.nodes, best_path(self.nodes, self.marked))

    def _repr_svg_(self) -> str:
        return to_svg(self.nodes, best_path(self.nodes, self.marked))

    @property
    def path(self) -> list[TreeNode]:
        """The nodes of the best path, the root first."""
        marked = best_path(self.nodes, self.best)
        return [node for node in self.nodes if node["id"] in marked]


def read_trees(folder: Path) -> tuple[StoredTree, ...]:
    """Return the finished searches of a run; none if it is not a search run.

    Raises:
        RunError: the nodes of a record are not a tree, or the file cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return ()
    file = RecordFile(path, writable=False)
    try:
        return tuple(_parse_tree(record, path) for record in file.records())
    finally:
        file.close()


def _parse_tree(record: Mapping[str, Any], path: Path) -> StoredTree:
    """Return the tree of a record.

    Args:
        record: The record.
        path: The file, for messages.

    Raises:
        RunError: the nodes are not a tree, or a field is missing or has another type.
    """
    node_ids: set[int] = set()
    try:
        for node in record["nodes"]:
            if (node["parent_id"] is None) == bool(node_ids) or node["id"] in node_ids:
                raise ValueError(
                    "the nodes do not form a single tree in which parents come before children"
                )
            if node_ids and node["parent_id"] not in node_ids:
                raise ValueError(f"node {node['id']} is listed before its parent")
            node_ids.add(node["id"])
            if lacking := [name for name in _REQUIRED_FIELDS if name not in node]:
                raise ValueError(f"node {node['id']} has no field {lacking[0]!r}")
        return StoredTree(
            problem_id=record["problem_id"],
            method=str(record["method"]),
            solved=record.get("solved"),
            answer=record.get("answer"),
            best=record.get("best"),
            nodes=tuple(record["nodes"]),
            stopped=str(record.get("stopped") or ""),
            usage=record.get("usage") or {},
            repeat=int(record.get("sample_index") or 0),
            error=str(record.get("error") or ""),
            # An agent may solve its task without finishing the episode.
            is_finished=record.get("solved") is True
            or record.get("best") in record.get("candidates", (record.get("best"),)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{path}: the tree of problem {record.get('problem_id')!r} cannot be read ({error}); "
            "restore the file from a copy"
        ) from None


@dataclass(slots=True)  # a frozen class takes three times as long to create, and runs have many
class Sample:
    """A finished sample."""

    problem_id: str
    """The id of its problem."""
    index: int
    """Its number among the samples of the problem, from 0."""
    text: str
    """The generated text, with reasoning."""
    num_tokens: int
    """The number of generated tokens."""
    logprob: float | None
    """Natural-log probability of the whole sample, if it is known."""
    finish_reason: str
    """Why it ended, such as "stop" or "length"."""
    verdicts: Mapping[str, Verdict] | None
    """The verdict of each filter; None if the sample is not scored."""
    searched: bool = False
    """Whether it is the result of a search."""
    thinking: Thinking | None = None
    """Where its reasoning ends; None if it has none."""

    @property
    def end_reason(self) -> str:
        """The finish reason, and whether the sample ended during its reasoning."""
        cut = self.thinking is not None and not self.thinking.is_closed
        return f"{self.finish_reason} in thinking" if cut else self.finish_reason

    def verdict(self, filter: str) -> Verdict | None:
        """Return the verdict by one filter; None if there is none."""
        return None if self.verdicts is None else self.verdicts.get(filter)

    @property
    def parts(self) -> tuple[str, str]:
        """The text of its reasoning, tags included, and the text of its answer."""
        end = 0 if self.thinking is None else self.thinking.end
        return self.text[:end], answer_after(self.text, self.thinking)


@dataclass(frozen=True, slots=True)
class ProblemView:
    """A problem with its samples."""

    id: str
    question: str = ""
    """The question; empty if the data of the run are not available."""
    answer: str = ""
    """The reference answer; empty if the data of the run are not available."""
    prompt_tokens: int = 0
    """The number of prompt tokens; 0 without a sample."""
    samples: tuple[Sample, ...] = ()
    """Its finished samples."""
    group: str = ""
    """Its cluster for error bars; empty for none."""
    choice_tokens: int = 0
    """The number of tokens of its choices, which a likelihood run computes after the prompt."""
    images: tuple[RunImage, ...] = ()
    """The images of the question."""

    @property
    def reference(self) -> str:
        """The reference answer, for people."""
        return readable_reference(self.answer)


def describe_problem(problem: Problem | None) -> dict[str, Any]:
    """Return the texts of a problem as fields of a `ProblemView`; empty without its data."""
    names = ("question", "answer", "group")
    return {} if problem is None else {name: getattr(problem, name) for name in names}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunView:
    """The current state of a run."""

    name: str
    path: Path
    info: "RunInfo"
    task: str
    source: str
    """Where its problems come from."""
    num_samples: int
    """The planned number of samples of each problem."""
    problems: tuple[ProblemView, ...]
    """All its problems, with the samples that are finished."""
    filters: tuple[str, ...] = ()
    """The names of the filters, the headline first; empty if nothing is scored."""
    report: Report | None = None
    """The metrics; None if nothing is scored."""
    tree: "Node | None" = None
    """The tree of prompts; None if the data of the run are not available."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    """Tokens, seconds and other costs, summed over all parts of the run."""
    timeline: Sequence[Mapping[str, Any]] = ()
    """The progress of the run over time."""
    trees: tuple[StoredTree, ...] = ()
    """Its search trees."""
    notices: tuple[str, ...] = ()
    """Which data are missing or have changed, and why, one sentence each."""
    searched: bool = False
    """Whether its problems were searched. Each sample is then the result of a search."""
    fixed: int | None = None
    """For a run with early stopping, the number of samples of each problem in the first round,
    which is always drawn; None for other runs."""
    voters: Mapping[str, int] | None = None
    """For a run with early stopping, the number of samples that vote, by id of each problem that
    has stopped."""
    summaries: "tuple[Summary, ...]" = ()
    """The judgements of its samples; see `treegen judge`."""
    judged: "tuple[Table, ...]" = ()
    """The judgements of its samples as tables; see `treegen judge`."""
    images: RunImages | None = None
    """Its images."""
    job: "Job | None" = field(default=None, repr=False, compare=False)
    """Its task and problems, if the data of the run are available."""
    _verdicts: dict[tuple[str, float], Mapping[str, Sequence[Verdict]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def unread(self) -> Message:
        """The notice that its problems cannot be read; empty if they can."""
        return next((line for line in self.notices if isinstance(line, UnreadNotice)), Message())

    @property
    def unit(self) -> str:
        """The unit of what is drawn for a problem, in the plural."""
        return "searches" if self.searched else "samples"

    @property
    def headline(self) -> str:
        """The first filter; empty if nothing is scored."""
        return self.filters[0] if self.filters else ""

    @property
    def num_done(self) -> int:
        """The number of finished samples."""
        return sum(len(problem.samples) for problem in self.problems)

    @property
    def samples(self) -> Iterator[Sample]:
        """The finished samples by problem and index."""
        return chain.from_iterable([problem.samples for problem in self.problems])

    @property
    def why_unscored(self) -> str:
        """Why the run has no scores, if it has none, and what to do."""
        if any(self.samples):
            return f"the samples of {self.path} are not scored; score the run first"
        return f"the run {self.path} has no finished samples; finish the run with --resume"

    @property
    def votes(self) -> bool:
        """Whether the samples of a problem vote on its answer."""
        return self.num_samples > 1 and self.report is not None and bool(self.report.majority)

    @property
    def results(self) -> dict[str, Any]:
        """The state of the run, by names of results.json, for the text that describes it."""
        return {
            "usage": self.usage,
            "done": self.num_done,
            "planned": self.info.planned,
            "versions": self.info.versions,
        }

    def open(self) -> RunDir:
        """Open the directory of the run, which may have more records by now."""
        return (SearchRunDir if self.searched else RunDir).open(self.path)

    def read_records(self) -> dict[Key, dict[str, Any]]:
        """Return the records of the run's directory by key."""
        with self.open() as run:
            return {(row["problem_id"], row["sample_index"]): row for row in run.records()}

    def is_whole(self, problem: ProblemView) -> bool:
        """Return whether no more samples of a problem will be drawn."""
        if self.voters is not None:
            return problem.id in self.voters
        return len(problem.samples) >= self.num_samples

    def verdicts(self, filter: str, *, fixed: bool = False) -> Mapping[str, Sequence[Verdict]]:
        """Return the verdicts of one filter by problem; problems without any are left out.

        Args:
            filter: The name of the filter.
            fixed: Use only samples that are always drawn, for estimates that early stopping would
                bias.
        """
        max_samples = self.fixed if fixed and self.fixed is not None else math.inf
        if (cached := self._verdicts.get((filter, max_samples))) is not None:
            return cached
        verdicts_of = {
            problem.id: [
                verdict
                for sample in problem.samples
                if sample.index < max_samples and (verdict := sample.verdict(filter)) is not None
            ]
            for problem in self.problems
        }
        scored = {problem_id: verdicts for problem_id, verdicts in verdicts_of.items() if verdicts}
        self._verdicts[filter, max_samples] = scored
        return scored


def task_name(info: "RunInfo") -> str:
    """Return the name of a run's task."""
    task = info.identity.get("task")
    return str(task.get("name", "?")) if isinstance(task, Mapping) else "run"


class UnreadNotice(Message):
    """The notice that the problems of a run cannot be read."""


class UnscoredNotice(UnreadNotice):
    """The notice that samples are not scored, because the problems cannot be read."""


def describe_unread(error: TreegenError, *, searched: bool) -> UnreadNotice:
    """Return the notice that the problems of a run cannot be read.

    Args:
        error: Why they cannot be read.
        searched: Whether it is a search run, which stores its scores.
    """
    reason = error.message.marked
    if searched:
        return UnreadNotice(f"the problems cannot be read, so their texts are not shown: {reason}")
    return UnscoredNotice(f"the problems cannot be read, so the samples are not scored: {reason}")


def settings_group(info: "RunInfo", name: str) -> Mapping[str, Any]:
    """Return a group of a run's settings, such as "sampling"; empty if there is none."""
    group = info.identity.get(name)
    return group if isinstance(group, Mapping) else {}


def check_settings(info: "RunInfo", path: Path) -> None:
    """Check the types of the settings that reports read, because a run may be another person's.

    Args:
        info: The content of run.json.
        path: The directory of the run, for the message.

    Raises:
        RunError: a setting has a wrong type.
    """
    identity = info.identity
    try:
        check_types(identity, {"num_samples": (int,), **dict.fromkeys(_SETTINGS, (dict,))})
        for name, types in _SETTINGS.items():
            check_types(identity.get(name, {}), types)
        for stop in identity.get("sampling", {}).get("stop") or ():
            check_types({"an element of stop": stop}, {"an element of stop": (str,)})
    except ValueError as error:
        raise RunError(f"{path}/run.json: {error}; restore the file from a copy") from None


def count_equal_samples(a: RunView, b: RunView, left_out: Container[str]) -> tuple[int, int]:
    """Return how many pairs of samples have equal texts, and how many pairs there are.

    A pair has the same problem and the same index in both runs.

    Args:
        a: The first run.
        b: The second run.
        left_out: The problems that are not compared.
    """
    texts = {(s.problem_id, s.index): s.text for p in a.problems for s in p.samples}
    pairs = [
        texts[s.problem_id, s.index] == s.text
        for p in b.problems
        if p.id not in left_out
        for s in p.samples
        if (s.problem_id, s.index) in texts
    ]
    return sum(pairs), len(pairs)
