"""Samples that another tool has not scored do not count, as they do not count in that tool."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from foreign_logs import (
    chosen_rows,
    exported_rows,
    generated_rows,
    inspect_sample,
    write_inspect,
    write_lm_eval,
)

from treegen.errors import InputError
from treegen.report.compare import compare_runs
from treegen.report.exchange import FORMATS, export_run, import_log
from treegen.report.load import load_run
from treegen.report.view import RunView


def value(view: RunView, filter: str, metric: str = "exact_match") -> float | None:
    assert view.report is not None
    return view.report.value(metric, filter)


def scored(path: Path, scores_of_samples: list[Any], epochs: int = 1, ending: str = "json") -> Path:
    """An Inspect log of samples with the given scores; of several epochs, sample by sample."""
    samples = [
        inspect_sample(place // epochs, place % epochs + 1, scores)
        for place, scores in enumerate(scores_of_samples)
    ]
    return write_inspect(path.with_suffix(f".{ending}"), samples, epochs)


SCORES: list[Any] = [
    {"match": "C", "words": 0.5, "parts": {"a": 1, "b": "yes"}},
    {"match": "I", "words": 1.0, "parts": {"a": 0, "b": None}},
    {"match": math.nan, "words": 0.0, "parts": {"a": math.nan, "b": "no"}},
    {"match": "P", "words": math.nan, "parts": math.nan},
    {"words": 1, "parts": {"a": 1, "b": True}},
    None,
    {},
    {"match": "what?", "words": 0, "parts": {"a": 0.25, "b": "1"}},
]


@pytest.mark.parametrize("epochs", [1, 2])
def test_metrics_are_those_of_inspect(epochs: int, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    from inspect_ai._eval.task.results import ScorerInfo, eval_results
    from inspect_ai.log import read_eval_log
    from inspect_ai.scorer import SampleScore, mean, mean_score

    log = scored(tmp_path / "log", SCORES, epochs, "eval")
    stored = read_eval_log(str(log))
    assert stored.samples is not None
    rows = [
        {
            name: SampleScore(score=score, sample_id=sample.id, scorer=name)
            for name, score in (sample.scores or {}).items()
        }
        for sample in stored.samples
    ]
    found, _ = eval_results(
        len(rows),
        rows,
        mean_score(),
        [
            ScorerInfo("match", [mean()]),
            ScorerInfo("words", [mean()]),
            ScorerInfo("parts", {"*": [mean()]}),
        ],
        None,
    )
    wanted = {each.name: each.metrics["mean"].value for each in found.scores}
    (path,) = import_log(log, tmp_path / "run")
    view = load_run(path)
    assert view.filters == ("match", "words", "parts/a", "parts/b")
    for name in view.filters:
        try:
            got = value(view, name, "mean_score")
        except InputError:  # without partial credit it is the share of right samples
            got = value(view, name)
        assert got == pytest.approx(wanted[name.removeprefix("parts/")]), name
    assert view.num_done == 6  # two have no score at all


def test_notices_list_samples_without_scores(tmp_path: Path, treegen: Command) -> None:
    pytest.importorskip("inspect_ai")
    log = scored(tmp_path / "log", SCORES)
    done = treegen("import", log, "-o", tmp_path / "run")
    assert done.code == 0
    for message in (
        "2 samples have no score and are left out",
        "2 samples have no score of match and do not count in its metrics",
        "1 samples have no score of words",
        "1 scores of match are not numbers and count as 0",
    ):
        assert message in done.err
    run = tmp_path / "run"
    assert "2 of 8 samples have no score in the log" in " ".join(load_run(run).notices)
    for name in ("show", "score"):
        assert treegen(name, run).code == 0
    assert treegen("report", run, "-o", tmp_path / "page.html", "--no-plots").code == 0
    for to in FORMATS:
        export_run(run, to, tmp_path / "out" / to / "made.eval")
    view = load_run(run)
    with pytest.raises(InputError, match="no verdicts in one or both of the runs"):
        compare_runs(view, view, partial=True)
    # Exports keep it, in either direction.
    back = load_run(import_log(tmp_path / "out/inspect/made.eval", tmp_path / "back")[0])
    assert [(s.problem_id, s.verdicts) for s in back.samples] == [
        (s.problem_id, s.verdicts) for s in view.samples
    ]
    again = load_run(import_log(tmp_path / "out/lm-eval/made.eval", tmp_path / "again")[0])
    for name in view.filters:
        assert value(again, name) == value(view, name)


def test_a_scorer_that_counts_is_left_out_as_a_whole(tmp_path: Path, treegen: Command) -> None:
    pytest.importorskip("inspect_ai")
    scores_of_samples = [{"words": number, "said": "good", "match": "C"} for number in range(4)]
    done = treegen("import", scored(tmp_path / "log", scores_of_samples), "-o", tmp_path / "run")
    assert done.code == 0 and load_run(tmp_path / "run").filters == ("match",)
    for name in ("words", "said"):
        assert f"the scores of {name} are not numbers from 0 to 1 and are left out" in done.err
    with pytest.raises(InputError, match="no scores from 0 to 1"):
        import_log(scored(tmp_path / "none", [None, {}]), tmp_path / "other")


def test_documents_without_a_metric_do_not_count(tmp_path: Path, treegen: Command) -> None:
    """lm-eval takes the mean over the documents that have the metric."""
    rows = generated_rows(4, filters=("strict",))  # 1 and 3 are right
    rows[0] |= {"metrics": [], "exact_match": None}
    rows[2] |= {"exact_match": math.nan}
    rows[1] |= {"metrics": ["exact_match", "bleu"], "bleu": 0.5}
    rows[3] |= {"metrics": ["exact_match", "bleu"], "bleu": 31.0}
    log = write_lm_eval(tmp_path / "log", {"task": rows})
    done = treegen("import", log, "-o", tmp_path / "run")
    assert done.code == 0, done.err
    assert "2 samples have no score and are left out" in done.err
    assert "the values of bleu are not numbers from 0 to 1 and are left out" in done.err
    view = load_run(tmp_path / "run")
    assert (view.num_done, len(view.problems), value(view, "strict")) == (2, 4, 1.0)


def test_an_export_of_samples_that_are_not_judged_stays_so(tmp_path: Path) -> None:
    rows = exported_rows(2, 2)
    rows[0]["by_response"][1]["correct"] = None
    rows[0]["by_response"][1]["answer"] = None
    (path,) = import_log(write_lm_eval(tmp_path / "log", {"task": rows}), tmp_path / "run")
    view = load_run(path)
    assert view.num_done == 3 and value(view, "strict") == 0.25


def test_an_export_counts_the_samples_of_each_scorer(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    scores: list[Any] = [{"match": "C", "words": "I"}, {"match": "I"}, {"words": "C"}, {}]
    (run,) = import_log(scored(tmp_path / "log", scores), tmp_path / "run")
    (file,) = export_run(run, "inspect", tmp_path / "export.json")
    by_scorer = json.loads(file.read_text())["results"]["scores"]
    numbers = [(row["name"], row["scored_samples"], row["unscored_samples"]) for row in by_scorer]
    assert numbers == [("match", 2, 1), ("words", 2, 1)]


def _as_lists(arguments: dict[str, dict[str, Any]]) -> list[list[Any]]:
    return [[*request.values()] for request in arguments.values()]


@pytest.mark.parametrize(
    ("convert", "text"),
    [(dict, "yes"), (_as_lists, "yes"), (len, "0")],
    ids=["dict", "list", "int"],
)
def test_texts_of_choices_are_read_from_both_forms_of_arguments(
    convert: Callable[[Any], Any], text: str, tmp_path: Path
) -> None:
    rows = [row | {"arguments": convert(row["arguments"])} for row in chosen_rows()]
    (run,) = import_log(write_lm_eval(tmp_path / "log", {"task": rows}), tmp_path / "run")
    assert {sample.text for sample in load_run(run).samples} == {text}


def test_a_log_probability_beyond_floats_is_an_error_that_names_the_line(tmp_path: Path) -> None:
    rows = chosen_rows()
    rows[1]["resps"][0][0][0] = 10**400
    with pytest.raises(InputError, match="line 2: resps must contain strings, or"):
        import_log(write_lm_eval(tmp_path / "log", {"task": rows}), tmp_path / "run")
