"""Runs that stop draw the first samples of the run that does not, and say where they stopped."""

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cli_cases import Command, write_jsonl

from treegen.api.run import open_run
from treegen.common.outputs import Completion
from treegen.errors import InputError
from treegen.evals.config.eval_settings import EvalSettings, resolve_eval_settings
from treegen.evals.config.stop_rule import parse_stop_rule
from treegen.evals.early_stopping import Rounds
from treegen.evals.job import load_job, prepare_job
from treegen.evals.sampling import RecordMaker, sample
from treegen.evals.scoring.results import write_results
from treegen.evals.scoring.samples import restore_rounds
from treegen.evals.statistics.confidence import Confidence, group_confidences, stops_at, summary
from treegen.llm import LLM
from treegen.runs import RunDir
from treegen.search.strategies.majority import is_decided

Key = tuple[str, int]
BASE: dict[str, Any] = {
    "task": "gsm8k",
    "model": "demo",
    "limit": 3,
    "num_samples": 12,
    "memory": "16MiB",
    "max_tokens": 40,
    "num_fewshot": 2,
    "max_rows": 12,
    "log_tokens": True,
    "confidence": {"window": 6, "top": 5},
}
N = 12


def _records(run: Path) -> dict[Key, dict[str, Any]]:
    with RunDir.open(run) as opened:
        return {(r["problem_id"], r["sample_index"]): r for r in opened.records()}


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", memory="16MiB", max_rows=12)


def _open(path: Path, settings: EvalSettings) -> tuple[Any, RunDir]:
    from treegen.evals.identity import run_settings

    job = load_job(settings)
    run_choices = run_settings(job, dtype="float32", fingerprint="x")
    if path.exists():
        return job, RunDir.resume(path, run_choices)
    return job, RunDir.create(path, run_choices)


def _draw(llm: LLM, path: Path, kill_after: int | None = None, **changes: Any) -> dict[str, Any]:
    """Draw a run, or go on with it; returns its results."""
    job, run = _open(path, resolve_eval_settings({**BASE, **changes}))
    with run:
        restore_rounds(job, run)
        had = len(run.done)
        for _ in sample(
            prepare_job(job, llm.model_info), run, llm, stop=lambda: killed(run, had, kill_after)
        ):
            pass
        results, _ = write_results(job, run)
        return results


def killed(run: RunDir, had: int, after: int | None) -> bool:
    return after is not None and len(run.done) >= had + after


@pytest.fixture(scope="module")
def whole(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that draws everything, with the confidence at every token."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert _draw(llm, path)["complete"]
    return path


def _answers(path: Path) -> dict[Key, str | None]:
    job, run = _open(path, resolve_eval_settings(BASE))
    problems = {problem.id: problem for problem in job.data.problems}
    with run:
        return {
            (r["problem_id"], r["sample_index"]): job.task.score(
                problems[r["problem_id"]], r["text"]
            )[job.task.filters[0]].answer
            for r in run.records()
        }


def _same(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    return all(
        actual[name] == expected[name] for name in ("text", "tokens", "seed", "finish_reason")
    )


@pytest.mark.parametrize(("batch", "chance"), [(2, 0.95), (5, 0.9)])
def test_a_decided_problem_gets_no_further_samples(
    llm: LLM, whole: Path, tmp_path: Path, batch: int, chance: float
) -> None:
    found = _draw(llm, tmp_path / "run", stop_when=f"decided:{chance}", stop_batch=batch)
    full, answers, stopped = _records(whole), _answers(whole), _records(tmp_path / "run")
    stopping = found["stopping"]
    expected: dict[str, dict[str, Any]] = {}
    for problem in stopping["problems"]:
        ends = [*range(batch, N, batch), N]
        voters = ([answers[problem, i] for i in range(end)] for end in ends)
        decided = [is_decided(each, chance) for each in voters]
        end = ends[decided.index(True)] if any(decided) else N
        expected[problem] = {"samples": end, "why": "decided" if any(decided) else "all drawn"}
    assert stopping["problems"] == expected
    assert set(stopped) == {
        (problem, i) for problem, row in expected.items() for i in range(row["samples"])
    }
    assert all(_same(stopped[key], full[key]) for key in stopped)
    assert found["complete"] and found["done"] == len(stopped) < found["planned"]
    assert stopping["spared"] == found["planned"] - len(stopped) > 0


def test_a_run_that_is_killed_stops_where_the_whole_one_does(
    llm: LLM, whole: Path, tmp_path: Path
) -> None:
    rules: dict[str, Any] = {"stop_when": "decided", "stop_batch": 4}
    rules_too: dict[str, Any] = {"confidence": {"window": 6, "top": 5, "keep": 0.5, "warmup": 5}}
    for name, how in (("rounds", rules), ("both", {**rules, **rules_too})):
        once = _draw(llm, tmp_path / f"{name}-once", **how)
        path = tmp_path / f"{name}-parts"
        for _ in range(20):
            again = _draw(llm, path, kill_after=14, **how)
            if again["complete"]:
                break
        assert again["stopping"] == once["stopping"]
        first, second = _records(tmp_path / f"{name}-once"), _records(path)
        assert first.keys() == second.keys()
        assert all(_same(first[key], second[key]) for key in first)
    # To take the rule away draws the rest.
    path = tmp_path / "rounds-once"
    assert _draw(llm, path, stop_when="never")["done"] == 3 * N
    full, rest = _records(whole), _records(path)
    assert all(_same(rest[key], full[key]) for key in full)


@pytest.mark.parametrize("keep", [0.2, 0.9])
def test_samples_end_where_the_rule_says_of_the_whole_ones(
    llm: LLM, whole: Path, tmp_path: Path, keep: float
) -> None:
    """The rule is applied to the samples of a run that stopped none, one at a time."""
    deep = Confidence(window=6, top=5, keep=keep, warmup=6)
    found = _draw(llm, tmp_path / "run", confidence=asdict(deep))
    full, stopped = _records(whole), _records(tmp_path / "run")
    assert stopped.keys() == full.keys()
    ended = 0
    for problem, row in found["stopping"]["problems"].items():
        lowest = [min(group_confidences(full[problem, i]["confidences"], 6)) for i in range(6)]
        floor = float(np.quantile(lowest, 1 - keep)) * (1 - 1e-4)
        assert row["floor"] == pytest.approx(floor, rel=1e-4)
        for index in range(N):
            actual, expected = stopped[problem, index], full[problem, index]
            # Another batch rounds otherwise, so the run's own floor and numbers decide.
            at = stops_at(expected["confidences"], 6, row["floor"]) if index >= 6 else None
            if at is None:
                assert _same(actual, expected)
                continue
            ended += 1
            assert (actual["finish_reason"], actual["num_tokens"]) == ("confidence", at)
            assert actual["tokens"] == expected["tokens"][:at]
            assert expected["text"].startswith(actual["text"])
        assert row["unsure"] == sum(
            stopped[problem, i]["finish_reason"] == "confidence" for i in range(N)
        )
    assert 0 < ended < 18
    report = found["report"]
    kinds = {row[0]: row[1] for row in report["tables"][-1]["rows"]}
    assert kinds == {"warm-up": 18, "whole": 18 - ended, "ended early": ended}


def test_what_is_told_of_single_samples_does_not_depend_on_the_stop(
    llm: LLM, whole: Path, tmp_path: Path
) -> None:
    found = _draw(llm, tmp_path / "run", stop_when="decided", stop_batch=4)
    answers = _answers(whole)
    problems = list(found["stopping"]["problems"])
    values = {(row["metric"], row["filter"]): row for row in found["report"]["metrics"]}
    job, run = _open(whole, resolve_eval_settings(BASE))
    run.close()
    right = {p.id: p.answer for p in job.data.problems}
    share = [sum(answers[p, i] == right[p].split()[-1] for i in range(4)) / 4 for p in problems]
    first = values["exact_match", job.task.filters[0]]
    assert first["value"] == pytest.approx(math.fsum(share) / len(share))
    assert {row["k"] for row in found["report"]["majority"]} <= {1, 2, 3, 4}


def test_a_stopped_vote_is_of_the_procedure() -> None:
    """Over many made-up problems the mean vote is what the rule gives, by simulation."""
    settings = resolve_eval_settings(
        {**BASE, "num_samples": 24, "stop_when": "decided", "stop_batch": 4}
    )
    rng = np.random.default_rng(0)
    names = [str(i) for i in range(300)]
    rounds = Rounds(settings, names)
    drawn = 0
    todo = rounds.take_due()
    while todo:
        for name, indices in todo:
            for index in rng.permutation(indices).tolist():  # they end in any order
                drawn += 1
                answer = "a" if rng.random() < 0.6 else "b"
                record = {"problem_id": name, "sample_index": index, "finish_reason": "stop"}
                rounds.add(record, answer)
        todo = rounds.take_due()
    voters = rounds.voters()
    assert set(voters) == set(names) and drawn == sum(voters.values())
    assert rounds.num_not_drawn == 300 * 24 - drawn
    ends = []
    for _ in range(4000):
        answers = ["a" if rng.random() < 0.6 else "b" for _ in range(24)]
        ends.append(next((e for e in range(4, 24, 4) if is_decided(answers[:e], 0.95)), 24))
    error = float(np.std(ends)) / math.sqrt(300)
    assert drawn / 300 == pytest.approx(float(np.mean(ends)), abs=4 * error)


def test_confidence_of_a_sample_by_definition() -> None:
    rng = np.random.default_rng(1)
    for num, window in ((1, 4), (3, 4), (4, 4), (37, 5), (200, 16)):
        values = rng.random(num).astype(np.float32).tolist()
        size = min(window, num)
        groups = [sum(values[i : i + size]) / size for i in range(num - size + 1)]
        found = summary(values, window)
        assert found["mean"] == pytest.approx(sum(values) / num)
        assert found["lowest"] == pytest.approx(min(groups))
        assert found["tail"] == pytest.approx(groups[-1])
        least = sorted(groups)[: max(1, len(groups) // 10)]
        assert found["bottom"] == pytest.approx(sum(least) / len(least))
        at = stops_at(values, window, float(np.quantile(groups, 0.3)))
        below = [i + window for i, g in enumerate(groups) if g < np.quantile(groups, 0.3)]
        first = below[0] if below and num > window and below[0] < num else None
        assert at == first
    assert summary([], 4) == {}


@pytest.mark.parametrize("rule", ["decide", "decided:", "decided:2", "decided:.5", "decided:x", ""])
def test_rules_that_are_none(rule: str) -> None:
    with pytest.raises(InputError, match="stop_when"):
        parse_stop_rule(rule)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--stop-when", "soon"], "--stop-when must be `decided`"),
        (["--stop-when", "decided", "--temperature", "0"], "greedy"),
        (["--stop-when", "decided", "--no-score"], "--no-score"),
        (["--stop-when", "decided", "--stop-batch", "0"], "--stop-batch"),
        (["--confidence", "keep=0"], "keep"),
        (["--confidence", "kept=1"], "known: top, window, keep, warmup"),
        (["--votes", "majority"], "there is no vote"),
        (["--votes", "logprob:top"], "top=SHARE"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    treegen: Command, elsewhere: None, no_weights: None, arguments: list[str], message: str
) -> None:
    done = treegen("eval", "gsm8k", "--limit", "2", *arguments)
    assert message in done.error


def test_tasks_without_votes_refuse(treegen: Command, tmp_path: Path, no_weights: None) -> None:
    for split in ("dev", "test"):
        (tmp_path / split).mkdir()
        rows = [f"What is {i} of {split}?,{i},b,c,d,A\n" for i in range(6)]
        (tmp_path / split / f"anatomy_{split}.csv").write_text("".join(rows))
    done = treegen("eval", "mmlu", "-M", "demo", "--data", tmp_path, "--votes", "all")
    assert "most likely choice" in done.error
    done = treegen("eval", "apps", "-M", "demo", "--stop-when", "decided", "--allow-code-execution")
    assert "programs" in done.error


def test_a_stored_run_is_scored_with_further_votes(
    llm: LLM, whole: Path, tmp_path: Path, treegen: Command
) -> None:
    path = tmp_path / "run"
    _draw(llm, path, num_samples=4, self_certainty=True)
    lines = [{"problem_id": p, "sample_index": i, "score": (i + 1) / 4} for p, i in _records(path)]
    write_jsonl(path / "scores.jsonl", lines)
    done = treegen("score", path, "--votes", "all,score:best", "--maj", "2,4")
    assert done.code == 0, done.err
    rows = done.document["runs"][0]["report"]["tables"][-1]["rows"]
    first = [row[:3] for row in rows if row[1] == rows[0][1]]
    assert {row[0] for row in first} == {
        "logprob:borda=0.5",
        "likelihood:weighted",
        "certainty:borda=0.5",
        "confidence:weighted",
        "lowest:weighted",
        "bottom:weighted",
        "tail:weighted",
        "score:weighted",
        "score:best",
    }
    assert {row[2] for row in first} == {2, 4}
    (path / "scores.jsonl").write_text('{"problem_id": "x", "sample_index": 0, "score": "no"}\n')
    assert "scores.jsonl:1" in treegen("score", path, "--votes", "score").error


def _draw_small(treegen: Command, path: Path, *more: object) -> None:
    small = ("--limit", "3", "-n", "4", "--max-tokens", "24")
    assert treegen("eval", "gsm8k", *small, "-o", path, "-q", *more).code == 0


def test_scoring_adds_votes_to_those_of_before(tmp_path: Path, treegen: Command) -> None:
    path = tmp_path / "run"
    _draw_small(treegen, path, "--votes", "logprob:best")

    def names(document: dict[str, Any]) -> list[str]:
        rows = document["report"]["tables"][-1]["rows"]
        return [row[0] for row in rows if row[1] == rows[0][1]]

    done = treegen("score", path, "--votes", "likelihood", "--maj", "2")
    expected = ["logprob:best", "likelihood:weighted"]
    assert names(done.document["runs"][0]) == expected
    done = treegen("score", path, "--votes", "certainty,logprob:borda=1")
    assert "the results do not include the vote certainty:borda=0.5" in done.err
    assert "`treegen eval --self-certainty`" in done.err
    expected.append("logprob:borda=1")
    assert names(done.document["runs"][0]) == expected
    # Every command shows them, and so does a run that is continued.
    shown = open_run(path).view.report
    assert shown is not None and {row[2] for row in shown.tables[-1].rows} == {2}
    assert {str(row[0]) for row in shown.tables[-1].rows} == {*expected}
    again = treegen("eval", "--resume", path, "--votes", "logprob:best,likelihood:best")
    assert names(again.document["runs"][0]) == [*expected, "likelihood:best"]
    # Nothing is written if no vote can be computed.
    before = (path / "results.json").read_bytes()
    done = treegen("score", path, "--votes", "certainty:best,score")
    num = len((path / "samples.jsonl").read_text().splitlines())
    message = f"no vote can be computed: certainty:best ({num} of {num} samples have no certainty;"
    assert done.code == 2 and message in done.error
    assert (path / "results.json").read_bytes() == before


def test_hidden_filters_have_no_votes_on_the_screen(tmp_path: Path, treegen: Command) -> None:
    path = tmp_path / "run"
    _draw_small(treegen, path, "--votes", "logprob")
    hidden = "flexible-extract"
    rows = [row for row in treegen("show", path).out.splitlines() if hidden in row]
    assert rows == [f"other filters: strict-match, {hidden}; --all-filters shows them"]
    out = treegen("show", path, "--all-filters").out
    assert any(hidden in r for r in out.splitlines() if r.startswith("|logprob:borda"))


def test_equal_answers_decide_together() -> None:
    settings = resolve_eval_settings({**BASE, "stop_when": "decided:0.9", "stop_batch": 4})
    same = {"1/2": "0.5", "0.5": "0.5", "0.50": "0.5", "2": "2"}

    def representatives(answers: Collection[str]) -> dict[str, str]:
        return {answer: same[answer] for answer in answers}

    drawn = {}
    for name, how in (("by strings", None), ("by classes", representatives)):
        rounds = Rounds(settings, ["q"], how)
        for index, answer in enumerate(["1/2", "0.5", "0.50", "1/2"]):
            rounds.take_due()
            rounds.add({"problem_id": "q", "sample_index": index, "finish_reason": "stop"}, answer)
        drawn[name] = rounds.take_due()
    assert drawn == {"by strings": [("q", [4, 5, 6, 7])], "by classes": []}


def test_samples_of_a_round_under_way_are_no_voters() -> None:
    settings = resolve_eval_settings({**BASE, "stop_when": "decided", "stop_batch": 4})
    rounds = Rounds(settings, ["q"])
    rounds.take_due()
    for index, answer in enumerate("abababa"):
        rounds.add({"problem_id": "q", "sample_index": index, "finish_reason": "stop"}, answer)
        rounds.take_due()
    assert rounds.to_json()["problems"]["q"] == {"samples": 4, "why": "under way"}
    assert rounds.voters() == {}


def test_a_sample_without_tokens_has_no_self_certainty() -> None:
    """Its structure allows no token at all, for example."""
    settings = resolve_eval_settings({**BASE, "self_certainty": True})
    request = SimpleNamespace(id="q", tokens=np.arange(3))
    job = SimpleNamespace(settings=settings, task_requests=None)
    completion = Completion("q", 0, 1, "", (), (), "error")
    records = RecordMaker(SimpleNamespace(requests=[request]), job)  # type: ignore[arg-type]
    record = records.record(completion)
    assert record["num_tokens"] == 0 and "self_certainty" not in record
