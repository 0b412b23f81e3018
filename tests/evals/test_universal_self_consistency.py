"""Universal self-consistency: prompts, what a text picks, and how picks are stored and told."""

import json
from pathlib import Path

import pytest
from cli_cases import Command
from report_cases import make_run

from treegen.evals.config.eval_settings import resolve_eval_settings, stored_choices
from treegen.evals.job import load_job
from treegen.evals.scoring.universal_self_consistency import (
    FILE,
    parse_pick,
    question_of,
    questions_of,
    read_picks,
)
from treegen.runs import RunDir
from treegen.runs.record_format import decode_record, encode_record


@pytest.mark.parametrize(
    ("text", "index"),
    [
        ("The most consistent response is Response 3", 7),
        (" The most consistent response is response 2 because ...", 4),
        ("Response #1", 0),
        ("the most consistent response is 2.", 4),
        ("They all differ.", 0),
        ("The most consistent response is Response 9", 0),
        ("The most consistent response is Response 0", 0),
        ("Response " + "9" * 5000, 0),
    ],
)
def test_what_a_text_picks(text: str, index: int) -> None:
    assert parse_pick(text, (0, 4, 7)) == index


def test_a_prompt_shows_the_samples_in_order() -> None:
    question = question_of("p", "How many?", {4: " four ", 0: "zero", 7: "seven"}, most=2)
    assert question.samples == (0, 4)
    assert (
        "the question: How many?\n\nResponse 1: zero\n\nResponse 2: four\n\nEv" in question.prompt
    )
    assert question.key != question_of("p", "How many?", {0: "zero", 4: "five"}).key


def test_picks_are_stored_as_they_come_and_reported(tmp_path: Path, treegen: Command) -> None:
    run = tmp_path / "run"
    done = treegen(
        "eval", "gsm8k", "--limit", "3", "-n", "4", "--max-tokens", "24", "-o", run, "-q"
    )
    assert done.code == 0
    assert treegen("usc", run, "--most", "2").document["picks"] == 3
    assert {shown for _, shown in read_picks(run).values()} == {2}
    first = (run / FILE).read_bytes()
    assert treegen("usc", run, "--most", "2").document["picks"] == 3
    assert (run / FILE).read_bytes() == first  # there was nothing to do
    # Half of a line is what a kill leaves; the rest goes on.
    assert treegen("usc", run).document["picks"] == 3
    whole = (run / FILE).read_bytes()
    (run / FILE).write_bytes(whole[: len(first) + 40])
    assert treegen("usc", run).document["picks"] == 3
    assert (run / FILE).read_bytes() == whole
    scored = treegen("score", run, "--votes", "usc,likelihood")
    rows = scored.document["runs"][0]["report"]["tables"][-1]["rows"]
    assert [row[:3] for row in rows[:2]] == [
        ["usc", "numeric", 4],
        ["likelihood:weighted", "numeric", 4],
    ]
    with RunDir.open(run) as opened:
        job = load_job(resolve_eval_settings({}, {**stored_choices(opened.info), "score": True}))
        texts = {(r["problem_id"], r["sample_index"]): r["text"] for r in opened.records()}
        assert [len(q.samples) for q in questions_of(job, opened)] == [4, 4, 4]
    right = [
        job.task.score(problem, texts[problem.id, read_picks(run)[problem.id][0]])["numeric"]
        for problem in job.data.problems
    ]
    assert rows[0][3] == pytest.approx(sum(verdict.correct for verdict in right) / 3)


def test_what_cannot_be_picked_from_is_refused(
    tmp_path: Path, treegen: Command, no_weights: None
) -> None:
    run = make_run(tmp_path / "run", num_problems=3, num_samples=2, done=[2, 0, 1])
    assert "has no sample to pick from" in treegen("usc", run).error
    # A run that was given away has its data in its directory.
    (tmp_path / "run-data.jsonl").rename(run / "run-data.jsonl")
    assert "has no sample to pick from" in treegen("usc", run).error
    before = (run / "run.json").read_bytes()
    assert "no usc; run `treegen usc`" in treegen("score", run, "--votes", "usc").error
    assert (run / "run.json").read_bytes() == before and not (run / "results.json").exists()


def test_samples_after_a_missing_one_are_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=4)
    lines = (run / "samples.jsonl").read_text().splitlines(keepends=True)
    parsed = [json.loads(line) for line in lines]
    first = parsed[0]["problem_id"]
    missing = [
        i for i, r in enumerate(parsed) if (r["problem_id"], r["sample_index"]) == (first, 2)
    ]
    del lines[missing[0]]
    (run / "samples.jsonl").write_text("".join(lines))
    with RunDir.open(run) as opened:
        job = load_job(resolve_eval_settings({}, {**stored_choices(opened.info), "score": True}))
        assert [prompt.samples for prompt in questions_of(job, opened)] == [(0, 1), (0, 1, 2, 3)]


def test_the_reasoning_of_samples_is_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=1, num_samples=2)
    thinking = {"tokens": 4, "end": 8, "closed": True}
    lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
    records = [
        {**decode_record(line), "text": "Let me..It is 4.", "thinking": thinking} for line in lines
    ]
    (run / "samples.jsonl").write_bytes(b"".join(map(encode_record, records)))
    with RunDir.open(run) as opened:
        job = load_job(resolve_eval_settings({}, {**stored_choices(opened.info), "score": True}))
        (prompt,) = questions_of(job, opened)
    assert "Response 2: It is 4.\n" in prompt.prompt and "Let me" not in prompt.prompt
