"""A run of one's own file in other tools' logs: its fields, references and system text."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl
from report_cases import make_run

from treegen import evaluate
from treegen.errors import InputError, RunError
from treegen.report.compare import compare_runs
from treegen.report.exchange import export_run, import_log
from treegen.report.load import load_run
from treegen.report.run_settings import KeySettings, differing_columns
from treegen.report.view import settings_group

inspect_ai = pytest.importorskip("inspect_ai")

from inspect_ai.log import read_eval_log, write_eval_log  # noqa: E402
from inspect_ai.model import ChatMessageSystem  # noqa: E402

ROWS = (
    {"uid": "a", "problem": "What is 6 times 4?", "result": 24, "topic": "times", "group": "x"},
    {"uid": "b", "problem": "What is 3 + 4?", "result": ["7", "seven"], "topic": "\ud800"},
)


@pytest.fixture(scope="module")
def make_own_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("own")
    data = write_jsonl(folder / "own.jsonl", ROWS)

    def make(name: str, **choices: Any) -> Path:
        fields = {"answer_field": "result", "id_field": "uid", "template": "Q: {problem}\\nA:"}
        evaluate(
            "jsonl",
            model="demo",
            data=data,
            task_args=fields,
            num_samples=2,
            max_tokens=4,
            temperature=0.7,
            output=folder / name,
            progress=False,
            **choices,
        )
        return folder / name

    return make


@pytest.fixture(scope="module")
def told(make_own_run: Callable[..., Path]) -> Path:
    return make_own_run("told", system_instruction="Answer briefly.")


def test_lm_evals_files_have_the_fields_of_the_line(told: Path, tmp_path: Path) -> None:
    results, samples = export_run(told, "lm-eval", tmp_path)
    first, second = map(json.loads, samples.read_text().splitlines())
    assert first["doc"] == {"id": "a", **ROWS[0]}
    assert first["target"] == "24"
    assert second["doc"]["topic"] == "?"
    assert json.loads(second["target"]) == ["7", "seven"]
    document = json.loads(results.read_text())
    assert document["system_instruction"] == "Answer briefly."
    assert len(document["system_instruction_sha"]) == 64


def test_inspect_has_targets_fields_and_a_system_message(told: Path, tmp_path: Path) -> None:
    (file,) = export_run(told, "inspect", tmp_path / "told.json")
    log = read_eval_log(str(file))
    assert log.eval.task_args["answer_field"] == "result"
    samples = {str(sample.id): sample for sample in log.samples or ()}
    assert samples["a"].target == "24"
    assert samples["b"].target == ["7", "seven"]
    assert samples["a"].metadata["fields"] == ROWS[0]
    assert "group" not in samples["a"].metadata  # the field of the line forms no clusters
    assert not isinstance(samples["a"].input, str)
    turns = [(turn.role, turn.text) for turn in samples["a"].input]
    assert turns == [("system", "Answer briefly."), ("user", "Q: What is 6 times 4?\nA:")]


def test_every_eval_ever_lists_the_references(told: Path, tmp_path: Path) -> None:
    _, samples = export_run(told, "every-eval-ever", tmp_path)
    rows = map(json.loads, samples.read_text().splitlines())
    references = {row["sample_id"]: row["input"]["reference"] for row in rows}
    assert references == {"a": ["24"], "b": ["7", "seven"]}


@pytest.mark.parametrize(
    ("group_field", "unit"), [("topic", "clusters of problems"), ("", "problems")]
)
def test_every_eval_ever_names_the_unit_of_intervals(
    tmp_path: Path, group_field: str, unit: str
) -> None:
    rows = [{"question": f"{i}?", "answer": "1", "topic": f"t{i % 2}"} for i in range(4)]
    data = write_jsonl(tmp_path / "own.jsonl", rows)
    fields = {"group_field": group_field} if group_field else {}
    run = tmp_path / "run"
    evaluate(
        "jsonl", model="demo", data=data, task_args=fields, max_tokens=2, output=run, progress=False
    )
    aggregate, _ = export_run(run, "every-eval-ever", tmp_path)
    for result in json.loads(aggregate.read_text())["evaluation_results"]:
        interval = result["score_details"]["uncertainty"]["confidence_interval"]
        assert interval["method"] == f"adjusted t interval over {unit}"


@pytest.mark.parametrize("to", ["inspect", "lm-eval"])
@pytest.mark.parametrize("chat", [False, True])
def test_a_run_equals_its_export(
    make_own_run: Callable[..., Path], tmp_path: Path, to: str, chat: bool
) -> None:
    choices: dict[str, Any] = {"system_instruction": "Be brief."}
    if chat:
        template = tmp_path / "chat.jinja"
        template.write_text("{% for turn in messages %}{{ turn.content }}|{% endfor %}")
        choices |= {"apply_chat_template": True, "chat_template": str(template)}
    run = make_own_run(f"{to}-{chat}", **choices)
    log = export_run(run, to, tmp_path / ("log.eval" if to == "inspect" else "logs"))[0]
    (back,) = import_log(log, tmp_path / "back")
    found = compare_runs(load_run(run), load_run(back))
    assert not found.differ_in
    assert found.num_equal == found.num_paired == 4


@pytest.mark.parametrize(
    ("problem_id", "is_name"), [("x" * 60_000, True), ("x" * 70_000, False), ("a\0b", False)]
)
def test_ids_of_any_length_are_imported(tmp_path: Path, problem_id: str, is_name: bool) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", [{"id": problem_id, "question": "1?", "answer": "1"}])
    run = tmp_path / "run"
    evaluate("jsonl", model="demo", data=data, max_tokens=2, output=run, progress=False)
    for to, path in ("lm-eval", "logs"), ("inspect", "log.json"), ("inspect", "log.eval"):
        if path == "log.eval" and not is_name:
            with pytest.raises(InputError, match="write a log that ends in"):
                export_run(run, to, tmp_path / path)
            continue
        (back,) = import_log(export_run(run, to, tmp_path / path)[0], tmp_path / f"{path}-back")
        assert [problem.id for problem in load_run(back).problems] == [problem_id]


def test_lm_evals_files_have_the_filters_of_tokens(
    make_own_run: Callable[..., Path], tmp_path: Path
) -> None:
    filters = {"top_p": 0.9, "top_k": 5, "min_p": 0.01}
    results, _ = export_run(make_own_run("filtered", **filters), "lm-eval", tmp_path / "logs")
    (back,) = import_log(results, tmp_path / "back")
    assert KeySettings.of(load_run(back)).values.items() >= filters.items()


@pytest.mark.parametrize("to", ["inspect", "lm-eval"])
def test_the_system_text_of_a_log_is_compared(
    told: Path, make_own_run: Callable[..., Path], tmp_path: Path, to: str
) -> None:
    plain = make_own_run(f"plain-{to}")
    log = export_run(plain, to, tmp_path / ("log.eval" if to == "inspect" else "logs"))[0]
    (back,) = import_log(log, tmp_path / "back")
    found = compare_runs(load_run(told), load_run(back))
    assert found.differ_in == ("system_instruction 'Answer briefly.' / none",)


def test_settings_that_a_log_lacks_are_not_compared(told: Path, tmp_path: Path) -> None:
    (file,) = export_run(told, "inspect", tmp_path / "told.json")
    log = read_eval_log(str(file))
    log.eval.model_generate_config.temperature = log.plan.config.temperature = None
    write_eval_log(log, str(file))
    (back,) = import_log(file, tmp_path / "back")
    ours, theirs = (KeySettings.of(load_run(path)) for path in (told, back))
    assert not ours.differing(theirs)
    hotter = KeySettings(ours.model, {**ours.values, "temperature": 1.0}, ours.weights)
    assert differing_columns([ours, hotter, theirs]) == {
        "temperature": ["0.7", "1.0", "not recorded"]
    }


def test_the_system_message_of_a_foreign_log_is_read(told: Path, tmp_path: Path) -> None:
    (file,) = export_run(told, "inspect", tmp_path / "told.json")
    log = read_eval_log(str(file))
    log.eval.metadata = None
    write_eval_log(log, str(file))
    (back,) = import_log(file, tmp_path / "same")
    prompt = settings_group(load_run(back).info, "prompt")
    assert prompt["system_instruction"] == "Answer briefly."
    assert log.samples is not None
    log.samples[0].messages[0] = ChatMessageSystem(content="Something else.")
    write_eval_log(log, str(file))
    (back,) = import_log(file, tmp_path / "several")
    assert not settings_group(load_run(back).info, "prompt")["system_instruction"]
    assert not KeySettings.of(load_run(back)).is_known("system_instruction")


@pytest.mark.parametrize(
    ("to", "folder"), [("lm-eval", "lm-eval/made-up"), ("every-eval-ever", "every-eval-ever/data")]
)
def test_links_in_a_run_do_not_lead_exports_out_of_it(to: str, folder: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2)
    (outside := tmp_path / "outside").mkdir()
    (link := run / folder).parent.mkdir()
    link.symlink_to(outside)
    with pytest.raises(RunError, match="a symbolic link that leads out of the run"):
        export_run(run, to)
    assert not any(outside.iterdir())
    link.unlink()
    assert export_run(run, to) == export_run(run, to)
