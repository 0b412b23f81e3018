"""The audit of runs: its command, its readers, its numbers, and hostile texts."""

import gzip
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from agent_runs import load_job, run_job, walker
from audit_cases import NO_BEGIN, import_run
from cli_cases import Command, write_jsonl
from click.testing import CliRunner
from report_cases import make_search_run, set_fingerprint

from treegen import evaluate
from treegen.cli.main import cli
from treegen.errors import InputError, TreegenError
from treegen.evals.statistics.estimators import difference_interval
from treegen.evals.verdict import Verdict
from treegen.report.audit.audit import audit_run, audit_view
from treegen.report.audit.equivalence import compare, find_programs
from treegen.report.audit.findings import Audit
from treegen.report.audit.readers import (
    CHOICE_RULES,
    NUMBER_RULES,
    next_problem,
    value_of,
    visible,
)
from treegen.report.audit.sample_checks import is_repetition
from treegen.report.html_page import write_page
from treegen.report.load import load_run
from treegen.report.view import RunView
from treegen.runs.record_format import encode_record
from treegen.tasks.gsm8k import GSM8K

_MISREAD = [[("The answer is 18.", "17", False)]]


def _kinds(audit: Audit) -> dict[str, str]:
    return {finding.kind: finding.severity for finding in audit.findings}


def test_the_command_prints_findings_and_fails_on_request(repository: Path, tmp_path: Path) -> None:
    clean = repository / "examples" / "run"
    done = CliRunner().invoke(cli, ["audit", str(clean), "--fail-on", "low", "--json"])
    assert done.exit_code == 0, done.output
    (audit,) = json.loads(done.stdout)["audits"]
    assert audit["counts"] == {"high": 0, "medium": 0, "low": 0} and audit["answers"] == "number"
    bad = import_run(tmp_path, [("How many?", "18")], _MISREAD)
    done = CliRunner().invoke(cli, ["audit", str(clean), str(bad), "--fail-on", "high"])
    assert done.exit_code == 1, done.output
    assert "HIGH right-answer-rejected: 1 of 1 samples" in done.output
    assert "Minus this run" in done.output
    assert CliRunner().invoke(cli, ["audit", str(bad)]).exit_code == 0
    with pytest.raises(InputError, match="run must be a path"):
        audit_run(None)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="severity"):
        audit_run(bad).has("worst")


def test_a_cut_off_sample_stated_no_answer_and_the_finding_counts_all_at_max_tokens(
    tmp_path: Path,
) -> None:
    unfinished, stated = "First we add nine and then", "The answer is 17, because"
    samples = [[(unfinished, None, False)]] * 3 + [[(stated, "17", False)], [(stated, "17", True)]]
    problems = [(f"How many in box {i}?", "18") for i in range(4)] + [("How many here?", "17")]
    audit = audit_run(import_run(tmp_path, problems, samples, finish="length"))
    (finding,) = [finding for finding in audit.findings if finding.kind == "cut-off"]
    assert (finding.count, finding.total) == (3, 5)
    assert "without a stated answer" in finding.message
    assert "5 of all samples ended at max_tokens" in finding.message


@pytest.mark.usefixtures("undrawn")
def test_the_page_has_the_audit(tmp_path: Path) -> None:
    view = load_run(import_run(tmp_path, [("How many?", "18")], _MISREAD))
    page, *_ = write_page([view], tmp_path / "page.html", plots=False, audits=[audit_view(view)])
    text = page.read_text()
    assert "Audit: 1 high, 0 medium, 0 low" in text and "right-answer-rejected" in text


def test_evaluate_warns_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "Say it.", "answer": "7"}\n')
    options: dict[str, Any] = {
        "data": str(data),
        "max_tokens": 2,
        "task_args": {"answer": "number"},
    }
    evaluate("jsonl", "demo", eager=True, output=tmp_path / "run", **options)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if "mislead" in line)
    assert f"treegen audit {tmp_path / 'run'}" in line


def test_rule_effects_are_paired_differences(tmp_path: Path) -> None:
    problems = [(f"How many are in box {i}?", str(10 + i)) for i in range(6)]
    samples = [
        [(f"The answer is {10 + i + (i % 3 == 0)}.", str(10 + i), True)] * 2 for i in range(6)
    ]
    audit = audit_run(import_run(tmp_path, problems, samples))
    rule = next(rule for rule in audit.rules if rule.rule == "strict-match")
    moved = [-1.0, 0.0, 0.0, -1.0, 0.0, 0.0]
    for metric in ("accuracy", "maj@2", "pass@2"):
        assert rule.values[metric][0] == pytest.approx(4 / 6)
        assert rule.differences[metric] == pytest.approx((-1 / 3, *difference_interval(moved)))
    assert rule.differing == 4 and _kinds(audit)["wrong-answer-accepted"] == "high"


@pytest.mark.parametrize(
    ("rule", "text", "answer"),
    [
        ("strict-match", "So 3 + 4 = 7.\n#### 7\n#### 9", "7"),
        ("last ####", "So 3 + 4 = 7.\n#### 7\n#### 9", "9"),
        ("flexible-extract", "It costs $1,200.", "$1,200."),
        ("match(numeric)", "It costs $1,200.", "1200"),
        ("Answer: N", "Answer: 5\nAnswer: $1,200 in all.", "1,200"),
        ("boxed number", r"\boxed{3} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("answer is N", "The answer is 4. No, the answer is **5**.", "5"),
        ("Answer: X, first", "Answer: B\nAnswer: C", "B"),
        ("ANSWER: X, last line", "ANSWER: B\nanswer: (c)", "C"),
        ("**Answer:** X, last", "**Answer:** D", "D"),
        ("answer is (X)", "the answer is (J), I think", "J"),
        ("boxed letter", r"\boxed{\text{E}}", "E"),
        ("leading letter", "(B) because", "B"),
        ("leading letter", "A, B and C are wrong", None),
    ],
)
def test_rules_read_as_published(rule: str, text: str, answer: str | None) -> None:
    (read,) = [each.read for each in (*NUMBER_RULES, *CHOICE_RULES) if each.name == rule]
    assert read(text) == answer


@pytest.mark.parametrize(
    ("answer", "value"),
    [("1,000", 1000), ("(0,1)", None), ("-3/4", -0.75), ("016", 16), ("3/0", None), ("2e9", None)],
)
def test_values_of_answers(answer: str, value: float | None) -> None:
    assert value_of(answer) == value


def test_formulas_are_compared_by_value_and_by_form() -> None:
    assert compare(r"\frac{1}{2004!}", r"\frac{1}{2006!}") == (False, False)
    assert compare(r"2\sqrt{3}", r"\sqrt{12}") == (True, True)
    assert compare("x^2+2x+1", "(x+1)^2") == (None, True)
    assert compare(r"50\%", "0.5") == (None, None)
    assert compare("10^{10^{10^{10}}}", "3") == (None, None)


def test_programs_are_found_as_evalplus_does() -> None:
    text = "Use this:\ndef f(x):\n    return x\nIt returns x.\n```\nprint(f(1))\n```"
    programs = find_programs(text, ["f"])
    assert programs is not None and programs["evalplus"] == "def f(x):\n    return x"
    assert programs["first block"] == "print(f(1))"


def test_programs_of_a_run_are_read_again(repository: Path, tmp_path: Path) -> None:
    old = repository / "tests" / "data" / "old_runs"
    run = shutil.copytree(old / "programs", tmp_path / "run")
    for file in (old / "problems").glob("programs*.jsonl"):
        shutil.copy(file, run)
    audit = audit_run(run)
    assert audit.answers == "code" and "reference solutions were not run" in " ".join(audit.notices)
    assert not audit.has("high")


def test_findings_on_votes_samples_and_data(tmp_path: Path) -> None:
    story = "The box had some apples and each of them was counted by hand. The answer is 1,000."
    problems = [("How many apples?", "1000"), ("How many  Apples?", "7"), ("Why was it? " * 5, "")]
    samples = [
        [(f"So it is 1000. {i}", "1,000" if i else "1000", i == 0) for i in range(3)],
        [(story, "1000", False)] * 3,
        [("\u042d\u0442\u043e " * 30, "x", False), ("", "x", False), ("No.", "x", False)],
    ]
    more: dict[str, Any] = {"prompt": "{question}", "sampling": {"temperature": 0.7}}
    run = import_run(tmp_path, problems, samples, **more)
    kinds = _kinds(audit_run(run))
    assert kinds["votes-split"] == "high"
    assert kinds["equal-samples"] == "low"
    assert kinds["contradicting-references"] == "high"
    assert kinds["no-reference"] == "high"
    assert {"other-language", "empty-sample"} <= set(kinds)


def test_a_reference_that_the_scorer_rejects(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = repository / "examples" / "run"
    view = load_run(run)
    monkeypatch.setattr(
        GSM8K, "score", lambda self, problem, text: {"numeric": Verdict("1", False)}
    )
    assert _kinds(audit_view(view))["reference-rejected"] == "high"


def _with_settings(view: RunView, model: Path, **prompt: Any) -> RunView:
    identity = {**view.info.identity, "prompt": prompt}
    info = replace(view.info, identity=identity, free={**view.info.free, "model": str(model)})
    return replace(view, info=info)


def test_findings_on_a_tokenizer(tmp_path: Path) -> None:
    prompt = "Q: What is it?\nA: 5\n\nQ: How many?\nA:"
    samples = [[("The answer is 18.\nQ: And then?", "18", True)]]
    more: dict[str, Any] = {"prompt": prompt, "num_fewshot": 1, "sampling": {"stop": ["###"]}}
    view = load_run(import_run(tmp_path, [("How many?", "18")], samples, **more))
    assert _kinds(audit_view(view))["separator-does-not-stop"] == "high"
    model = tmp_path / "model"
    model.mkdir()
    (model / "tokenizer_config.json").write_text(json.dumps(NO_BEGIN))
    (model / "config.json").write_text('{"model_type": "gemma2"}')
    plain = _kinds(audit_view(_with_settings(view, model)))
    assert plain["begin-token-missing"] == "medium" and plain["template-not-applied"] == "low"
    chat = {"apply_chat_template": True, "system_instruction": "Be brief."}
    assert _kinds(audit_view(_with_settings(view, model, **chat)))["system-text-dropped"] == "high"
    base = _kinds(audit_view(_with_settings(view, tmp_path / "some-base", **chat)))
    assert base["template-on-base-model"] == "medium"


def test_hostile_texts_take_linear_time_and_cannot_steer_a_terminal(tmp_path: Path) -> None:
    pieces = ("answer:", "answer is ", "\\boxed{", "#### ", "\nQ:", " ", "(", "-1,", "I ", "A) ")
    prose = "Some words come first, so that the text is not only its answer, and more of them. "
    texts = [f"{prose}{piece * (60_000 // len(piece))}\x1b[31m" for piece in pieces]
    texts.append(f"{prose}The answer is 5." + "\nQ: How many?" * 100_000)
    start = time.process_time()
    for text in texts:
        for rule in (*NUMBER_RULES, *CHOICE_RULES):
            rule.read(visible(text))
        next_problem(text)
        is_repetition(text)
    assert time.process_time() - start < 5
    sample = ("\x1b[31mThe answer is 18.\u202e", "1\x1b7", False)
    shown = str(audit_run(import_run(tmp_path, [("How many\x1b[2J?", "18")], [[sample]])))
    assert "right-answer-rejected" in shown
    assert "\x1b" not in shown and "\u202e" not in shown


def test_known_faulty_items(tmp_path: Path) -> None:
    """Items are known by id, or by the text of an item of MMLU-Redux under any id."""
    # Item 6 of virology in MMLU, "no correct answer" in MMLU-Redux.
    question = (
        "The major issue for HIV infection among the Latino population is:\n(A) Late detection of "
        "HIV status\n(B) Cultural beliefs\n(C) Immigration\n(D) All of the above"
    )
    problems = [(question, "D"), ("Which?\nA) x\nB) y", "A")]
    run = import_run(tmp_path, problems, [[("Answer: D", "D", True)], [("Answer: A", "A", True)]])
    (finding,) = (f for f in audit_run(run).findings if f.kind == "known-faulty-items")
    assert finding.count == 1 and finding.example.startswith("no right choice (MMLU-Redux")
    ids = tmp_path / "ids.txt"
    ids.write_text("# mine\n\n1\nnobody\n")
    done = CliRunner().invoke(cli, ["audit", str(run), "--faulty-items", str(ids)])
    assert "known-faulty-items: 2 of 2 problems" in done.output, done.output
    assert "1 of the 2 listed ids are problems of this run" in done.output
    for content in (b"", b"# none\n", b"\xff\xfe\x00"):
        ids.write_bytes(content)
        done = CliRunner().invoke(cli, ["audit", str(run), "--faulty-items", str(ids)])
        assert done.exit_code == 2 and "one problem id per line" in done.output


# Reference solutions that the audit runs, and problems that were published under another name


def _problems(repository: Path) -> list[dict[str, str]]:
    with gzip.open(repository / "tasks" / "data" / "HumanEval.jsonl.gz", "rt") as lines:
        return [json.loads(line) for line, _ in zip(lines, range(3), strict=False)]


def test_a_rejected_solution_is_found(repository: Path, tmp_path: Path, treegen: Command) -> None:
    rows = _problems(repository)
    rows[1]["canonical_solution"] = "    return []\n"
    del rows[2]["canonical_solution"]
    data = write_jsonl(tmp_path / "rows.jsonl", rows)
    for form in ("completion", "chat"):
        run = tmp_path / form
        words = ["-M", "demo", "--data", data, "--max-tokens", "4", "-n", "1"]
        done = treegen("eval", "humaneval", *words, "--task-arg", f"form={form}", "-o", run)
        assert "3/3 samples" in done.err
        done = treegen("audit", run)
        assert (
            "2 reference solutions were not run; run the solutions with: treegen audit" in done.out
        ), done.out
        done = treegen("audit", run, "--allow-code-execution", "--fail-on", "high")
        assert done.code == 1 and "HIGH reference-rejected: 1 of 2 problems" in done.out, done.out
        assert "example: problem HumanEval/1:" in done.out
    done = treegen("audit", run, "--sandbox", "none")
    assert done.code == 2 and "--allow-code-execution" in done.err


def test_the_commands_in_messages_quote_the_path_of_the_run(tmp_path: Path) -> None:
    run = import_run(
        tmp_path / "my run", [("What is $x$?", "$x$")], [[("It is $x$.", "$x$", True)]]
    )
    assert f"run: treegen audit '{run}'" in str(audit_view(load_run(run), quick=True))


def test_published_problems_under_another_name_are_found(repository: Path, tmp_path: Path) -> None:
    question = f"  {_problems(repository)[0]['prompt'].upper()}"
    for task, want in (("my-code", 1), ("openai_humaneval", 0)):
        problems = [(question, "7"), ("How many apples are left?", "7")]
        samples = [[("The answer is 7.", "7", True)]] * 2
        run = import_run(tmp_path / task, problems, samples, task=task)
        found = [f for f in audit_run(run).findings if f.kind == "published-elsewhere"]
        assert len(found) == want
    assert all(f.severity == "low" and f.count == 1 for f in found)


# In search runs, the audit checks only the texts that the model wrote


def _search(path: Path, change: Callable[[dict[str, Any]], None], **settings: Any) -> Audit:
    """The audit of a search run whose records are changed."""
    run = make_search_run(path, **settings)
    trees = []
    for tree in load_run(run).trees:
        record = {
            "problem_id": tree.problem_id,
            "sample_index": tree.repeat,
            "method": tree.method,
            "solved": tree.solved,
            "answer": tree.answer,
            "best": tree.best,
            "nodes": [dict(node) for node in tree.nodes],
        }
        change(record)
        trees.append(record)
    (run / "trees.jsonl").write_bytes(b"".join(map(encode_record, trees)))
    return audit_run(run)


def _leave_unsolved(record: dict[str, Any]) -> None:
    record.update(best=None, solved=False, answer=None, candidates=[])


def test_puzzles_with_the_same_numbers_and_other_targets_differ(tmp_path: Path) -> None:
    puzzles = [{"numbers": [4, 7, 9, 10], "target": target} for target in (40, 29)]
    data = write_jsonl(tmp_path / "puzzles.jsonl", puzzles)

    def count(name: str, prompt: str) -> int:
        def set_prompt(record: dict[str, Any]) -> None:
            record["nodes"][0]["text"] = prompt.format(record["problem_id"])

        found = _search(tmp_path / name, set_prompt, data=str(data)).findings
        return sum(f.count for f in found if f.kind == "contradicting-references")

    assert count("same", "4 7 9 10") == 2
    assert count("other", "Prompt of {}: 4 7 9 10") == 0


def test_a_search_without_a_solution_is_no_empty_sample(tmp_path: Path) -> None:
    audit = _search(tmp_path / "unsolved", _leave_unsolved)
    assert audit.findings == ()
    text = str(audit)
    assert "countdown: 12 searches; findings: 0 high" in text
    assert "not available" not in text, "the problems are bundled"
    assert "the audit does not check answers and prompts of a search run" in text

    def write_nothing(record: dict[str, Any]) -> None:
        _leave_unsolved(record)
        for node in record["nodes"][1:]:
            node["text"] = "\n"

    (finding,) = _search(tmp_path / "silent", write_nothing).findings
    assert (finding.kind, finding.share) == ("empty-sample", "12 of 12 searches")
    assert finding.location == "problem countdown-0, search 0"


def test_texts_between_the_turns_of_an_agent_are_not_the_models(tmp_path: Path) -> None:
    turn = "<|im_end|>\n<|im_start|>tool\nYou see a box.<|im_end|>\n<|im_start|>assistant\n"

    def talk(record: dict[str, Any], *, by_model: bool = False) -> None:
        nodes = record["nodes"] = record["nodes"][:4]
        for place, node in enumerate(nodes):
            node.update(parent_id=place - 1 if place else None, text="open the box", pruned=False)
        nodes[2].update(text=turn, finish_reason="stop" if by_model else "given")
        record["best"] = nodes[-1]["id"]

    assert _search(tmp_path / "given", talk).findings == ()
    (finding,) = _search(tmp_path / "own", lambda record: talk(record, by_model=True)).findings
    assert (finding.kind, finding.share) == ("end-token-in-text", "12 of 12 searches")


def test_a_run_of_an_agent_has_no_findings(tmp_path: Path) -> None:
    extra = {"problems": "3", "level": "easy"}
    for name, noise in (("beam", 0.5), ("sample", 0.9)):
        job = load_job("text-world", name, extra=extra, width=2, expand=3, depth=12)
        run_job(job, walker(noise), tmp_path / name)
        assert audit_run(tmp_path / name).findings == ()


def test_an_unfinished_path_is_not_cut_off(tmp_path: Path) -> None:
    def cut(record: dict[str, Any], *, is_finished: bool = True) -> None:
        record.update(solved=False, answer=None)
        record["candidates"] = [record["best"]] if is_finished else []
        record["nodes"][-1]["finish_reason"] = "length"

    unfinished = _search(tmp_path / "a", lambda record: cut(record, is_finished=False))
    assert unfinished.findings == ()
    never_ended, finding = sorted(_search(tmp_path / "b", cut).findings, key=lambda f: -len(f.kind))
    assert never_ended.kind == "end-never-reached"
    assert (finding.kind, finding.share) == ("cut-off", "12 of 12 searches")
    assert "12 of all samples ended at max_tokens" in finding.message


# Runs from elsewhere with well-formed files that lie: each is audited, or an error in one line


_DEEP: Any = {}
for _ in range(300):
    _DEEP = {"a": _DEEP}
_LIES: list[Any] = ["x", True, -1, 10**400, 1e308, [], [None], {}, _DEEP, "\ud800", "../../etc"]


def _change(value: Any, at: str, lie: Any) -> None:
    *above, last = at.split(".")
    for name in above:
        value = value.setdefault(name, {})
    value[last] = lie


@pytest.mark.parametrize(
    "at",
    [
        "planned",
        "settings.identity.sampling",
        "settings.identity.sampling.temperature",
        "settings.identity.sampling.stop",
        "settings.identity.prompt",
        "settings.identity.prompt.system_instruction",
        "settings.identity.data",
        "settings.identity.task",
        "settings.identity.imported",
        "settings.free.model",
        "settings.free.extra",
    ],
)
def test_forged_settings(tmp_path: Path, at: str) -> None:
    """The fingerprint of the settings is right, as whoever writes a run can compute it."""
    texts = [("The answer is 18.</think> The answer is 17.", "17", False)] * 3
    run = import_run(tmp_path, [("How many?", "18")], [texts])
    honest = json.loads((run / "run.json").read_text())
    for lie in _LIES:
        content = json.loads(json.dumps(honest))
        _change(content, at, lie)
        set_fingerprint(content)
        (run / "run.json").write_text(json.dumps(content))
        try:
            audit_run(run)
        except TreegenError as error:
            text = str(error)
            assert "\n" not in text and "please report" not in text and len(text) < 1500


@pytest.mark.parametrize("lie", [10**18, -5, "x", None, [], True, 2.5])
def test_forged_results(tmp_path: Path, lie: Any) -> None:
    run = import_run(tmp_path, [("How many?", "18")], [[("The answer is 18.", "18", True)]])
    (run / "results.json").write_text(json.dumps({"shortened": lie, "report": lie}))
    found = [f for f in audit_run(run).findings if f.kind == "prompt-shortened"]
    assert all(finding.count <= 1 for finding in found)
