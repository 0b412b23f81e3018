"""Right runs that look strange: no finding on them is high or medium, and no audit ends them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from audit_cases import import_run
from cli_cases import write_jsonl
from click.testing import CliRunner

import treegen.report.audit.audit as audits
from treegen import evaluate
from treegen.cli.main import cli
from treegen.report.audit.audit import audit_run
from treegen.report.audit.findings import Audit
from treegen.report.audit.prompt_checks import audit_prompts
from treegen.report.load import load_run

_GAS = "Which gas do plants take in?\nA) oxygen\nB) carbon dioxide\nC) helium\nD) neon"
_STEM = "Which of the following statements is true?"
_APPLES = ("How many apples are left in the old box?", "18")
_RIGHT = [[("Nine and nine are together what is left. The answer is 18.", "18", True)]]
_ZH = (
    "\u4eca\u5929\u5929\u6c14\u975e\u5e38\u597d\u6211\u4eec\u90fd\u53bb\u516c\u56ed\u6563\u6b65" * 3
)


def _severe(audit: Audit) -> set[str]:
    return {finding.kind for finding in audit.findings if finding.severity != "low"}


def _evaluate(folder: Path, answers: list[str], **options: Any) -> Audit:
    rows = ({"question": f"Say {i}.", "answer": answer} for i, answer in enumerate(answers))
    data = write_jsonl(folder / "data.jsonl", rows)
    run = evaluate("jsonl", "demo", eager=True, output=folder / "run", data=str(data), **options)
    return run.audit()


@pytest.mark.usefixtures("undrawn")
def test_an_audit_that_fails_is_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RecursionError("too deep\nby far")

    monkeypatch.setattr(audits, "audit_samples", fail)
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Say it.", "answer": "7"}\n')
    more: dict[str, Any] = {"max_tokens": 2, "task_args": {"answer": "number"}}
    run = evaluate("jsonl", "demo", eager=True, output=tmp_path / "run", data=str(data), **more)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "but the audit" in line)
    assert "the run is complete" in line and "too deep by far" in line
    assert "too deep by far" in run.report().read_text()
    done = CliRunner().invoke(cli, ["report", str(tmp_path / "run"), "--no-plots"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(cli, ["audit", str(tmp_path / "run")])
    assert done.exit_code == 2 and "too deep by far" in done.output, done.output


def test_names_with_escape_sequences_cannot_steer_a_terminal(tmp_path: Path) -> None:
    hostile = "x\n\x1b[2J"
    samples = [[("The answer is 18.", "17", False)]]
    more: dict[str, Any] = {
        "prompt": "Question: how many?\nAnswer:",
        "model": f"{hostile}-instruct",
    }
    shown = str(audit_run(import_run(tmp_path, [_APPLES], samples, task=hostile, **more)))
    assert "right-answer-rejected" in shown and "template-not-applied" in shown
    assert "\x1b" not in shown


@pytest.mark.parametrize("pattern", [r"<answer>(.*?)</answer>", r"Die Antwort lautet (\w+)"])
def test_a_scorer_with_a_form_of_its_own(tmp_path: Path, pattern: str) -> None:
    options: dict[str, Any] = {
        "max_tokens": 3,
        "task_args": {"answer": "regex", "pattern": pattern},
    }
    audit = _evaluate(tmp_path, [str(i) for i in range(10)], **options)
    assert "reference-rejected" not in {finding.kind for finding in audit.findings}


def test_references_of_several_forms(tmp_path: Path) -> None:
    answers = ['{"answer": "C", "options": ["1", "2", "3"]}', "oak"] * 5
    options: dict[str, Any] = {
        "max_tokens": 3,
        "task_args": {"answer": "regex", "pattern": r"It is (\w+)\."},
    }
    audit = _evaluate(tmp_path, answers, **options)
    assert "reference-rejected" not in {finding.kind for finding in audit.findings}


def test_one_reference_that_the_scorer_rejects_among_many(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "max_tokens": 3,
        "task_args": {"answer": "regex", "pattern": r"Answer: (\w+)"},
    }
    audit = _evaluate(tmp_path, [*map(str, range(20)), "too many"], **options)
    (finding,) = (f for f in audit.findings if f.kind == "reference-rejected")
    assert finding.count == 1 and finding.severity == "high"


@pytest.mark.parametrize("prompt", ["", "{question}\nA) {answer} is right\nAnswer:"])
def test_one_stem_with_different_choices(tmp_path: Path, prompt: str) -> None:
    samples = [[(f"Answer: {letter}", letter, True)] for letter in "ABB"]
    problems = [(_STEM, "A"), (_STEM, "B"), (_STEM, "B")]
    audit = audit_run(import_run(tmp_path, problems, samples, prompt=prompt))
    assert not _severe(audit) - ({"duplicate-problems"} if prompt else set())


@pytest.mark.parametrize(
    ("question", "prompt"),
    [
        (_STEM, "Q: {question}\nA) x\nB) y\nA: B\n\nQ: {question}\nA) v\nB) w\nA:"),
        (_GAS, "Q: Why?\nA: B\n\nQ: {question}\nRead it again: {question}\nA:"),
        (_GAS, "{question}\nRead the question again: {question}"),
    ],
)
def test_examples_with_the_same_stem(tmp_path: Path, question: str, prompt: str) -> None:
    samples = [[("Answer: B", "B", True)]]
    audit = audit_run(
        import_run(tmp_path, [(question, "B")], samples, prompt=prompt, num_fewshot=1)
    )
    assert not _severe(audit)


def test_an_example_with_other_spaces_is_found(tmp_path: Path) -> None:
    wide = _APPLES[0].replace("old", " old")
    prompt = f"Q: {wide}\nA: 18\n\nQ: {{question}}\nA:"
    audit = audit_run(import_run(tmp_path, [_APPLES], _RIGHT, prompt=prompt, num_fewshot=1))
    assert "problem-among-examples" in _severe(audit)


@pytest.mark.parametrize("tokens", [1, 4])
def test_short_answers_that_end_at_max_tokens(tmp_path: Path, tokens: int) -> None:
    samples = [[("A", "A", False)]] * 8
    problems = [(f"{_GAS} {i}", "B") for i in range(8)]
    run = import_run(tmp_path, problems, samples, finish="length", num_tokens=tokens)
    assert not _severe(audit_run(run))


def test_a_run_without_scores_has_no_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"max_tokens": 3, "task_args": {"answer": "number"}, "score": False}
    audit = _evaluate(tmp_path, [str(i) for i in range(10)], **options)
    assert not _severe(audit)
    assert "mislead" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (("Translate this to Chinese: the weather is nice, and we walk.", _ZH), _ZH),
        (("Write a question about apples.", "Question: 3?"), "The answer is 3.\nQuestion: 3?"),
        (("Write two.", "q"), "The answer is 3.\nQuestion: 3?\nAnswer: 4\nQuestion: 5?\nAnswer: 6"),
        (("Which tag opens it?", "<think>"), "It is the <think> tag, which opens reasoning."),
        (("Draw a table of 60 rows.", "table"), "| a | b |\n" * 60),
    ],
)
def test_strange_samples(tmp_path: Path, problem: tuple[str, str], text: str) -> None:
    assert not _severe(audit_run(import_run(tmp_path, [problem], [[(text, text, True)]])))


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 1.0, "top_k": 1}, {"temperature": 0.01}, {"temperature": 1, "top_p": 0.01}],
)
def test_nearly_greedy_samples_are_equal(tmp_path: Path, sampling: dict[str, float]) -> None:
    samples = [[("Plants need carbon for their sugar.\nAnswer: B", "B", True)] * 3]
    audit = audit_run(import_run(tmp_path, [(_GAS, "B")], samples, sampling=sampling))
    assert not _severe(audit)


@pytest.mark.parametrize(
    ("model", "is_chat"),
    [
        ("/data/base/Qwen2.5-7B-Instruct", True),
        ("google/gemma-2-9b-it-pt", False),
        ("/home/it/models/gpt-neo", False),
    ],
)
def test_names_of_models(tmp_path: Path, model: str, is_chat: bool) -> None:
    prompt = "Question: how many?\nAnswer:"
    audit = audit_run(import_run(tmp_path, [_APPLES], _RIGHT, model=model, prompt=prompt))
    assert _severe(audit) == ({"template-not-applied"} if is_chat else set())


def test_a_begin_token_by_hand(tmp_path: Path) -> None:
    view = load_run(import_run(tmp_path, [_APPLES], _RIGHT, prompt="<bos>Q: {question}\nA:"))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    identity = {name: value for name, value in view.info.identity.items() if name != "imported"}
    info = replace(view.info, identity=identity)
    prompts = {"0": "<bos>Q: How many apples?\nA:"}
    for adds, expected in ((False, []), (True, ["begin-token-twice"])):
        settings = {"bos_token": "<bos>", "add_bos_token": adds}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        findings = audit_prompts(replace(view, info=info), "number", prompts, tmp_path)
        assert [f.kind for f in findings if f.severity != "low"] == expected


def test_a_llama_without_a_begin_token_may_be_right(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    settings = {"bos_token": "<s>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    more: dict[str, Any] = {"model": str(tmp_path), "prompt": "Q: {question}\nA:"}
    assert not _severe(audit_run(import_run(tmp_path / "log", [_APPLES], _RIGHT, **more)))


def test_reasoning_that_the_scorer_left_out(tmp_path: Path) -> None:
    samples = [[("It may be 1,017 or 5.</think>The answer is 1,018.", "1018", False)]]
    assert not _severe(audit_run(import_run(tmp_path, [("How many?", "7")], samples)))


def test_questions_without_an_answer(tmp_path: Path) -> None:
    problems = [("Who wrote it?", "Lem"), ("Who wrote the other one?", "")]
    samples = [[("Lem", "Lem", True)], [("", "", True)]]
    kinds = {f.kind for f in audit_run(import_run(tmp_path, problems, samples)).findings}
    assert "no-reference" not in kinds


def test_a_template_may_end_with_a_space(tmp_path: Path) -> None:
    prompt = "<|start_header_id|>user\nHow many?<|assistant|> "
    assert not _severe(audit_run(import_run(tmp_path, [_APPLES], _RIGHT, prompt=prompt)))
