"""A run as pandas frames, for a notebook."""

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any

from treegen.common.formatting import flatten, replace_surrogates
from treegen.errors import require_extra
from treegen.report.calibration import compute_problem_points
from treegen.report.view import RunView
from treegen.runs import Key

if TYPE_CHECKING:
    import pandas


class Frames:
    """A loaded run as frames. They show the state at the time when the run was opened."""

    def __init__(
        self, view: RunView, records: Mapping[Key, Mapping[str, Any]] | None = None
    ) -> None:
        """Keep the run.

        Args:
            view: The loaded run.
            records: The records of the run by key, if they are already read.
        """
        self.view = view
        if records is not None:
            self._records = records

    def samples(self) -> "pandas.DataFrame":
        """Return a frame with a row for each finished sample, or each search of a search run.

        Its columns are the fields of the records, except the nodes of searches; fields of nested
        objects have dotted names. Scored samples have `answer` and `correct` by the headline
        filter, and `FILTER.answer` and `FILTER.correct` by each filter. The rows are in the order
        of problems and indices.

        Raises:
            InputError: pandas is not installed.
        """
        rows = []
        for sample in self.view.samples:
            key = sample.problem_id, sample.index
            if key not in self._records:  # finished after the samples were read
                continue
            row = _flatten(self._records[key])
            verdicts = {} if self.view.searched else sample.verdicts or {}  # searches store it
            for name, verdict in verdicts.items():
                row |= {f"{name}.answer": verdict.answer, f"{name}.correct": verdict.correct}
                if name == self.view.headline:
                    row |= {"answer": verdict.answer, "correct": verdict.correct}
            rows.append(row)
        return _frame(rows, ["problem_id", "sample_index", "text"])

    def problems(self) -> "pandas.DataFrame":
        """Return a frame with a row for each problem: its text, and the results of its samples.

        `accuracy` is the share of correct samples, `top_share` the share of the answer with most
        votes and `vote` the correctness of the vote (1/m if one of m tied answers is correct), all
        by the headline filter.

        Raises:
            InputError: pandas is not installed.
        """
        points = {}
        if self.view.filters:
            points = {p.index: p for p in compute_problem_points(self.view, self.view.headline)}
        rows = []
        for index, problem in enumerate(self.view.problems):
            row: dict[str, Any] = {
                "problem_id": problem.id,
                "question": problem.question,
                "reference": problem.reference,
                "group": problem.group,
                "prompt_tokens": problem.prompt_tokens,
                "num_samples": len(problem.samples),
            }
            if (point := points.get(index)) is not None:
                row |= {"accuracy": point.accuracy, "mean_tokens": point.mean_tokens}
                if self.view.votes:
                    row |= {"top_share": point.top_share, "vote": point.vote}
            rows.append(row)
        return _frame(rows, ["problem_id"])

    def metrics(self) -> "pandas.DataFrame":
        """Return a frame with a row for each metric of the run, including maj@k.

        Raises:
            InputError: pandas is not installed.
        """
        report = self.view.report
        rows: list[dict[str, Any]] = []
        if report is not None:
            document = report.to_json()
            rows += document["metrics"]
            rows += [{**row, "metric": f"maj@{row['k']}"} for row in document["majority"]]
        return _frame(rows, ["filter", "metric", "value"])

    def nodes(self) -> "pandas.DataFrame":
        """Return a frame with a row for each node of each search tree; empty without searches.

        Raises:
            InputError: pandas is not installed.
        """
        rows = [
            {"problem_id": tree.problem_id, "sample_index": tree.repeat, **_flatten(node)}
            for tree in self.view.trees
            for node in tree.nodes
        ]
        return _frame(rows, ["problem_id", "sample_index", "id"])

    def progress(self) -> "pandas.DataFrame":
        """Return a frame with a row for each entry of the run's timeline.

        Raises:
            InputError: pandas is not installed.
        """
        return _frame([_flatten(row) for row in self.view.timeline], ["part", "seconds"])

    @cached_property
    def _records(self) -> Mapping[Key, Mapping[str, Any]]:
        return self.view.read_records()


def _flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record; fields of nested objects have dotted names."""
    fields = {name: value for name, value in record.items() if name != "nodes"}  # in another frame
    return {name: value for name, value in flatten(fields) if not isinstance(value, Mapping)}


def _frame(rows: list[dict[str, Any]], first: list[str]) -> "pandas.DataFrame":
    """Return a frame that has its first columns even without a row."""
    # Arrow, in which pandas stores texts, cannot store half of a surrogate pair.
    rows = [
        {k: replace_surrogates(v) if isinstance(v, str) else v for k, v in row.items()}
        for row in rows
    ]
    with require_extra("a run as frames needs pandas", "pandas"):
        import pandas

    frame = pandas.DataFrame(rows)
    return frame if rows else frame.reindex(columns=first)
