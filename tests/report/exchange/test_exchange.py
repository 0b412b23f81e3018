"""Runs as other tools' logs, read by those tools; and logs of theirs as runs."""

import json
import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from cli_cases import Command, write_jsonl
from lm_eval_tasks import task_names, write_tasks
from report_cases import HOSTILE, answer_with, make_run, make_search_run

from treegen.common.formatting import replace_surrogates
from treegen.errors import InputError, RunError
from treegen.report.audit.audit import audit_run, audit_view
from treegen.report.compare import compare_runs
from treegen.report.exchange import FORMATS, export_run, import_log
from treegen.report.load import load_run
from treegen.report.view import RunView, read_trees
from treegen.runs import RunDir

inspect_ai = pytest.importorskip("inspect_ai")

from inspect_ai import Task, eval  # noqa: E402
from inspect_ai.dataset import Sample  # noqa: E402
from inspect_ai.log import EvalLog, list_eval_logs, read_eval_log  # noqa: E402
from inspect_ai.model import ModelOutput, ModelUsage, get_model  # noqa: E402
from inspect_ai.scorer import Score, includes, match, mean, scorer  # noqa: E402
from inspect_ai.solver import generate  # noqa: E402

lm_eval = pytest.importorskip("lm_eval", "0.4")

from lm_eval.loggers import EvaluationTracker  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402


def hostile(rng: random.Random, number: int, index: int) -> str:
    return rng.choice(HOSTILE[:7]) + answer_with(rng, number, index)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with texts that trip over things, and problems of which some are not finished."""
    path = tmp_path_factory.mktemp("runs") / "made"
    done = [5, 5, 0, 3, 5, 5, 1]
    return make_run(
        path, num_problems=7, num_samples=5, draw=hostile, done=done, seed=3, questions=HOSTILE[:6]
    )


def contents(view: RunView) -> dict[Any, Any]:
    """All that formats keep of a run's samples."""
    return {
        (s.problem_id, s.index): (
            replace_surrogates(s.text),
            {
                n: (v.answer and replace_surrogates(v.answer), v.correct)
                for n, v in (s.verdicts or {}).items()
            },
            s.num_tokens,
            s.finish_reason,
        )
        for s in view.samples
    }


def metrics(view: RunView) -> list[tuple[Any, ...]]:
    assert view.report is not None
    rows = [(m.filter, m.metric, m.value, m.low, m.high) for m in view.report.metrics]
    return rows + [(m.filter, m.k, m.value, m.low, m.high) for m in view.report.majority]


def test_inspect_reads_every_sample_of_its_log(run: Path, tmp_path: Path) -> None:
    export_run(run, "inspect", tmp_path / "logs" / "made.eval")
    (info,) = list_eval_logs(str(tmp_path / "logs"))
    log = read_eval_log(info)
    view = load_run(run)
    assert log.status == "cancelled"  # some samples are not drawn yet
    assert log.eval.config.epochs == 5 and log.eval.dataset.samples == 7
    assert log.results is not None and log.samples is not None
    found = {(str(s.id), s.epoch - 1): s for s in log.samples}
    assert len(found) == len(log.samples) == view.num_done
    prompts = {problem.id: problem for problem in view.problems}
    for sample in view.samples:
        logged = found[sample.problem_id, sample.index]
        assert logged.output.completion == replace_surrogates(sample.text)
        assert logged.output.usage is not None and sample.verdicts is not None
        assert logged.output.usage.output_tokens == sample.num_tokens
        assert (
            logged.output.stop_reason
            == {"stop": "stop", "length": "max_tokens"}[sample.finish_reason]
        )
        assert logged.target == prompts[sample.problem_id].answer
        assert (
            isinstance(logged.input, str)
            and replace_surrogates(prompts[sample.problem_id].question) in logged.input
        )
        assert logged.scores is not None
        assert {
            name: (score.value == "C", score.answer) for name, score in logged.scores.items()
        } == {
            name: (v.correct, v.answer and replace_surrogates(v.answer))
            for name, v in sample.verdicts.items()
        }
    assert view.report is not None
    for score in log.results.scores:
        assert score.metrics["exact_match"].value == view.report.value("exact_match", score.name)


@pytest.mark.parametrize("ending", ["eval", "json"])
def test_an_exported_log_comes_back_as_it_was(run: Path, tmp_path: Path, ending: str) -> None:
    (file,) = export_run(run, "inspect", tmp_path / f"made.{ending}")
    (back,) = import_log(file, tmp_path / "back")
    before, after = load_run(run), load_run(back)
    assert contents(after) == contents(before)
    assert metrics(after) == metrics(before)
    assert after.task == before.task and after.filters == before.filters


def test_lm_evals_files_come_back_as_they_were(run: Path, tmp_path: Path) -> None:
    results, _ = export_run(run, "lm-eval", tmp_path / "out")
    for log in (results, tmp_path / "out"):
        (back,) = import_log(log, tmp_path / f"back-{log.name}")
        before, after = load_run(run), load_run(back)
        assert contents(after) == contents(before)
        # Problems without a sample are not in its files.
        assert {p.id for p in after.problems} == {p.id for p in before.problems if p.samples}
        assert [row[:3] for row in metrics(after)] == [row[:3] for row in metrics(before)]
    document = json.loads(results.read_text())
    view = load_run(run)
    assert view.report is not None
    for name in view.filters:
        value = view.report.value("exact_match", name)
        assert document["results"]["gsm8k"][f"exact_match,{name}"] == value


def test_searches_have_their_trees_in_the_transcript(tmp_path: Path) -> None:
    run = make_search_run(tmp_path / "search", num_problems=4)
    (file,) = export_run(run, "inspect")
    log = read_eval_log(str(file))
    assert log.samples is not None
    trees = {tree.problem_id: tree for tree in read_trees(run)}
    for sample in log.samples:
        tree, stack = trees[str(sample.id)], list[str]()
        parents: dict[str, str | None] = {}
        for event in sample.events:
            if event.event == "span_begin":
                assert event.parent_id == (stack[-1] if stack else None)
                parents[event.id] = event.parent_id
                stack.append(event.id)
            elif event.event == "span_end":
                assert stack.pop() == event.id
            else:
                assert event.event == "info" and event.span_id == stack[-1]
                (node,) = (n for n in tree.nodes if f"node-{n['id']}" == stack[-1])
                assert event.data == json.loads(json.dumps(node))
        assert not stack
        assert parents == {
            f"node-{n['id']}": None if n["parent_id"] is None else f"node-{n['parent_id']}"
            for n in tree.nodes
        }
        assert sample.scores is not None
        assert (sample.scores["solved"].value == "C") == bool(tree.solved)


def _valid_by_its_schema(files: list[Path]) -> None:
    folder = os.environ.get("TREEGEN_TEST_DATA")
    schemas = Path(folder or "", "every_eval_ever")
    if not folder or not schemas.is_dir():
        pytest.skip("TREEGEN_TEST_DATA has no folder every_eval_ever with the schemas")
    jsonschema = pytest.importorskip("jsonschema")
    aggregate, samples = files
    jsonschema.validate(
        json.loads(aggregate.read_text()), json.loads((schemas / "eval.schema.json").read_text())
    )
    row_schema = json.loads((schemas / "instance_level_eval.schema.json").read_text())
    for line in samples.read_text().splitlines():
        jsonschema.validate(json.loads(line), row_schema)


@pytest.mark.parametrize("kind", ["samples", "searches"])
def test_every_eval_ever_joins_samples_to_scores(run: Path, tmp_path: Path, kind: str) -> None:
    if kind == "searches":
        run = make_search_run(tmp_path / "search", num_problems=4)
    files = export_run(run, "every-eval-ever", tmp_path / "out")
    aggregate, samples = files
    assert export_run(run, "every-eval-ever", tmp_path / "out") == files  # the same names again
    view = load_run(run)
    whole = json.loads(aggregate.read_text())
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    assert len(rows) == view.num_done * len(view.filters)
    assert whole["detailed_evaluation_results"]["total_rows"] == len(rows)
    assert whole["detailed_evaluation_results"]["file_path"] == str(
        samples.relative_to(tmp_path / "out")
    )
    assert aggregate.stem == samples.stem.removesuffix("_samples")
    scores = {r["evaluation_result_id"]: r["score_details"] for r in whole["evaluation_results"]}
    assert {row["evaluation_result_id"] for row in rows} <= set(scores)
    assert {row["evaluation_id"] for row in rows} == {whole["evaluation_id"]}
    for name in {row["evaluation_result_id"] for row in rows}:
        scores_of_sample: dict[str, list[float]] = {}
        for row in rows:
            if row["evaluation_result_id"] == name:
                scores_of_sample.setdefault(row["sample_id"], []).append(row["evaluation"]["score"])
        means = [sum(each) / len(each) for each in scores_of_sample.values()]
        assert scores[name]["score"] == pytest.approx(sum(means) / len(means))
    _valid_by_its_schema(files)


def test_parquet_has_the_tables_of_a_run(run: Path, tmp_path: Path) -> None:
    files = export_run(run, "parquet", tmp_path / "out")
    tables = {file.stem: pd.read_parquet(file) for file in files}
    view = load_run(run)
    assert set(tables) == {"samples", "problems", "metrics"}
    found = tables["samples"]
    keys = zip(found.problem_id, found.sample_index, strict=True)
    assert dict(zip(keys, found.text, strict=True)) == {
        (s.problem_id, s.index): replace_surrogates(s.text) for s in view.samples
    }
    searched = export_run(make_search_run(tmp_path / "s", num_problems=3), "parquet")
    nodes = next(file for file in searched if file.stem == "nodes")
    assert len(pd.read_parquet(nodes)) == 3 * 21


@scorer(metrics={"*": [mean()]})
def length() -> Any:
    async def score(state: Any, target: Any) -> Score:
        text = state.output.completion
        return Score(value={"short": len(text) < 12, "share": min(1.0, len(text) / 20)})

    return score


@scorer(metrics=[mean()])
def words() -> Any:
    async def score(state: Any, target: Any) -> Score:
        return Score(value=len(state.output.completion))  # no share of anything

    return score


@pytest.fixture(scope="module")
def inspect_log(tmp_path_factory: pytest.TempPathFactory) -> EvalLog:
    """A log that Inspect itself wrote: three epochs of five samples, four scorers."""
    rng = random.Random(0)
    texts = [f"ANSWER: {rng.randrange(3)} {'so' * rng.randrange(6)}".strip() for _ in range(40)]
    outputs = [ModelOutput.from_content("mockllm/model", text) for text in texts]
    for output in outputs:  # without it, the mock asks the network for a tokenizer
        output.usage = ModelUsage(input_tokens=9, output_tokens=4, total_tokens=13)
    samples = [Sample(id=i, input=f"What is {i} - {i}?", target="0") for i in range(5)]
    task = Task(
        dataset=samples,
        solver=generate(),
        name="zero",
        scorer=[includes(), match(location="any"), length(), words()],
    )
    model = get_model("mockllm/model", custom_outputs=outputs)
    folder = str(tmp_path_factory.mktemp("logs"))
    (log,) = eval(task, model=model, epochs=3, log_dir=folder, display="none", temperature=0.7)
    assert log.status == "success", log.error
    return log


def test_a_log_of_inspect_is_a_run_with_its_scores(inspect_log: EvalLog, tmp_path: Path) -> None:
    (path,) = import_log(inspect_log.location.removeprefix("file://"), tmp_path / "run")
    view = load_run(path)
    assert not view.notices
    assert (view.task, view.num_samples, len(view.problems)) == ("zero", 3, 5)
    assert view.filters == ("includes", "match", "length/short", "length/share")
    assert view.info.identity["sampling"]["temperature"] == 0.7
    assert inspect_log.samples is not None and inspect_log.results is not None
    found = {(s.problem_id, s.index): s for s in view.samples}
    for sample in inspect_log.samples:
        imported = found[str(sample.id), sample.epoch - 1]
        assert imported.text == sample.output.completion and imported.verdicts is not None
        assert sample.scores is not None
        for name in ("includes", "match"):
            assert imported.verdicts[name].correct == (sample.scores[name].value == "C")
            assert imported.verdicts[name].answer == sample.scores[name].answer
        value = sample.scores["length"].value
        assert isinstance(value, Mapping)
        share = imported.verdicts["length/share"]
        assert (share.credit if share.credit is not None else float(share.correct)) == value[
            "share"
        ]
    accuracy = {
        s.name: s.metrics["accuracy"].value
        for s in inspect_log.results.scores
        if "accuracy" in s.metrics
    }
    assert view.report is not None
    for name in ("includes", "match"):
        assert view.report.value("exact_match", name) == pytest.approx(accuracy[name])


def test_prompts_of_inspect_are_checked(inspect_log: EvalLog, tmp_path: Path) -> None:
    (path,) = import_log(inspect_log.location.removeprefix("file://"), tmp_path / "run")
    view = load_run(path)
    assert view.job is not None and inspect_log.samples is not None
    prompts = {p.id: p.metadata.get("prompt") for p in view.job.data.problems}
    for sample in inspect_log.samples:
        assert prompts[str(sample.id)] == sample.input
    audit = audit_view(view)
    assert not any("no prompts" in notice for notice in audit.notices)
    assert not any(finding.area == "prompts" for finding in audit.findings)
    problems = path / "problems.jsonl"
    rows = [json.loads(line) for line in problems.read_text().splitlines()]
    rows[0]["prompt"] = f"<s><s>{rows[0]['prompt']}"
    write_jsonl(problems, rows)
    found = {finding.kind for finding in audit_run(path).findings}
    assert "begin-token-twice" in found


def test_commands_read_imported_runs(
    inspect_log: EvalLog, tmp_path: Path, treegen: Command
) -> None:
    log = inspect_log.location.removeprefix("file://")
    first, second = tmp_path / "a", tmp_path / "b"
    done = treegen("import", log, "-o", first)
    assert done.code == 0, done.err
    assert "the scores of words are not numbers from 0 to 1" in done.err
    assert treegen("import", log, "-o", second, "--quiet").code == 0
    before = json.loads((first / "results.json").read_text())
    assert treegen("score", first).code == 0
    after = json.loads((first / "results.json").read_text())
    assert after["report"] == before["report"]
    shown = treegen("show", first)
    assert shown.code == 0 and "time: " not in shown.out
    for command in (["eval", "--resume"], ["usc"]):
        assert "was imported from the log of another tool" in treegen(*command, first).error
    assert treegen("show", first, "--problem", "3").code == 0
    assert treegen("report", first, second, "-o", tmp_path / "page.html", "--no-plots").code == 0
    assert treegen("compare", first, second, "--no-plots").code == 0
    found = compare_runs(load_run(first), load_run(second))
    assert all(row.value == 0 for row in found.differences)
    moved = tmp_path / "elsewhere"
    first.rename(moved)
    assert not load_run(moved).notices  # the problems went with it
    assert treegen("score", moved).code == 0
    assert treegen("export", moved, "--to", "inspect").code == 0
    (again,) = import_log(moved / "elsewhere.eval", tmp_path / "again")
    assert contents(load_run(again)) == contents(load_run(moved))


@pytest.fixture(scope="module")
def lm_eval_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results and samples that lm-eval itself wrote, of a model that answers at random."""
    folder = tmp_path_factory.mktemp("lm-eval")
    tracker = EvaluationTracker(output_path=str(folder / "out"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        found = lm_eval.simple_evaluate(
            model="dummy",
            tasks=task_names(),
            task_manager=TaskManager(include_path=str(write_tasks(folder / "tasks"))),
            log_samples=True,
            evaluation_tracker=tracker,
            bootstrap_iters=0,
        )
    samples = found.pop("samples")
    tracker.save_results_aggregated(results=found, samples=samples)
    for name in found["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    return folder / "out"


def test_a_log_of_lm_eval_is_a_run_for_each_task(lm_eval_log: Path, tmp_path: Path) -> None:
    (results,) = lm_eval_log.glob("*/results_*.json")
    document = json.loads(results.read_text())
    with pytest.raises(InputError, match="no scores from 0 to 1"):
        import_log(lm_eval_log, tmp_path / "none", tasks=["local_wikitext"])  # perplexity
    names = [name for name in task_names() if name != "local_wikitext"]
    runs = import_log(lm_eval_log, tmp_path / "runs", tasks=names)
    assert [path.name for path in runs] == names
    for path in runs:
        view = load_run(path)
        assert not view.notices and view.report is not None and view.num_done == 6
        found = document["results"][view.task]
        for name in view.filters:
            value = view.report.value("exact_match", name)
            metric = name if f"{name},none" in found else "exact_match"
            key = f"{name},none" if metric == name else f"exact_match,{name}"
            assert value == pytest.approx(found[key]), (view.task, name)
    by_task = {path.name: load_run(path) for path in runs}
    assert by_task["local_gsm8k_cot"].filters == ("strict-match", "flexible-extract")
    assert by_task["local_hellaswag"].filters == ("acc", "acc_norm")
    # Its votes are over eight responses, of which it judged none alone but the first.
    assert by_task["local_gsm8k_cot_self_consistency"].filters == ("score-first",)


def test_imports_and_exports_that_are_not_possible_are_errors(
    run: Path, lm_eval_log: Path, tmp_path: Path, treegen: Command
) -> None:
    with pytest.raises(InputError, match="did you mean 'parquet'"):
        export_run(run, "parket")
    with pytest.raises(InputError, match=r"must end in \.eval or \.json"):
        export_run(run, "inspect", tmp_path / "made.log")
    empty = make_run(tmp_path / "empty", num_problems=2, done=[0, 0])
    for to in FORMATS:
        with pytest.raises(RunError, match="no finished samples"):
            export_run(empty, to)
    with pytest.raises(InputError, match="the log cannot be found"):
        import_log(tmp_path / "nothing.eval", tmp_path / "x")
    (tmp_path / "bad.eval").write_text("no zip")
    with pytest.raises(InputError, match="cannot be read as an Inspect log"):
        import_log(tmp_path / "bad.eval", tmp_path / "x")
    with pytest.raises(InputError, match="did you mean 'local_mmlu'"):
        import_log(lm_eval_log, tmp_path / "x", tasks=["local_mmul"])
    assert not (tmp_path / "x").exists()
    with pytest.raises(RunError, match="already contains a run"):
        import_log(export_run(run, "inspect", tmp_path / "m.eval")[0], run)
    assert load_run(run).num_done  # it is as it was
    lost = tmp_path / "lost"  # a run whose run.json is gone keeps its samples
    make_run(lost, num_problems=2, num_samples=1)
    (lost / "run.json").unlink()
    with pytest.raises(RunError, match="is not empty"):
        import_log(tmp_path / "m.eval", lost)
    assert (lost / "samples.jsonl").stat().st_size
    with pytest.raises(RunError, match=r"^cannot write .*too long"):
        import_log(tmp_path / "m.eval", tmp_path / ("b" * 300))
    done = treegen("import", lm_eval_log / "nothing")
    assert done.code == 2 and done.err.count("\n") == 1
    with RunDir.open(run) as opened:
        assert opened.results() is None


def test_csv_is_written_by_pandas(tmp_path: Path, treegen: Command) -> None:
    run = make_run(tmp_path / "run")
    code = ".samples().to_csv('samples.csv')"
    error = treegen("export", run, "--to", "csv").error
    assert "'csv' is not one of 'inspect'" in error and "'parquet'; for CSV, run this" in error
    assert f"treegen.open_run('RUN'){code}" in error
    assert "for CSV" not in treegen("export", run, "--to", "inspekt").error
    with pytest.raises(InputError, match="there is no format 'csv'") as raised:
        export_run(run, "csv")
    assert f"treegen.open_run({str(run)!r}){code}" in str(raised.value)


def test_sizes_of_small_files_have_a_suitable_unit(tmp_path: Path, treegen: Command) -> None:
    done = treegen("export", make_run(tmp_path / "run"), "--to", "lm-eval")
    assert done.code == 0 and " KiB)" in done.out and "MiB" not in done.out
