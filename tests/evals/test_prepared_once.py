"""A job is fitted, tokenized and planned once, and each of its samples is scored once."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command

from treegen.api.run import evaluate, open_run
from treegen.evals import job as jobs
from treegen.evals.registry import get_task
from treegen.evals.scoring import verdict_cache
from treegen.evals.verdict import Verdict
from treegen.llm import LLM
from treegen.prompts import tokens
from treegen.prompts.plan import requests
from treegen.prompts.plan.compile import compile_plan
from treegen.runs import RunDir
from treegen.tasks.gsm8k import GSM8K

SMALL = ("--limit", "2", "-n", "2", "--max-tokens", "8", "--quiet")
CHOICES: dict[str, Any] = {"limit": 2, "num_samples": 2, "max_tokens": 8, "progress": False}


class Counts:
    """How often jobs are fitted and planned, and each text is tokenized."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.texts: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        encode, fit = tokens._encode_shared, jobs.fit_job

        def noted_encode(texts: Sequence[str], tokenizer: Any, **how: Any) -> Any:
            self.texts.update(texts)
            return encode(texts, tokenizer, **how)

        def noted_plan(made: Sequence[Any], **how: Any) -> Any:
            self.calls["plans"] += bool(
                made
            )  # a search or an on-demand run starts from an empty one
            return compile_plan(made, **how)

        def noted_fit(*args: Any) -> Any:
            self.calls["fits"] += 1
            return fit(*args)

        monkeypatch.setattr(tokens, "_encode_shared", noted_encode)
        monkeypatch.setattr(requests, "compile_plan", noted_plan)
        monkeypatch.setattr(jobs, "fit_job", noted_fit)

    def take(self) -> tuple[int, int, int]:
        """Return the fits, the plans and the most times that one text was tokenized."""
        most = max(self.texts.values(), default=0)
        found = self.calls["fits"], self.calls["plans"], most
        self.texts.clear()
        self.calls.clear()
        return found


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counts:
    return Counts(monkeypatch)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM("demo", memory="64MiB") as loaded:
        yield loaded


def cut(run: Path, num: int) -> None:
    """Leave the first samples of a run."""
    path = run / "samples.jsonl"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:num]))


STOPPING = ("--stop-when", "decided", "--stop-batch", "1")


@pytest.mark.parametrize("how", [(), STOPPING], ids=["all", "stopping"])
def test_a_command_fits_tokenizes_and_plans_once(
    how: tuple[str, ...], treegen: Command, counts: Counts, tiny: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert treegen("eval", "gsm8k", "-M", tiny, *SMALL, *how, "-o", run).code == 0
    assert counts.take() == (1, 1, 1)
    cut(run, 1)
    assert treegen("eval", "--resume", run, "--quiet").code == 0
    assert counts.take() == (1, 1, 1)
    assert treegen("eval", "--resume", run, "--quiet").code == 0
    assert counts.take() == (0, 0, 0)


def test_so_does_a_call_with_a_loaded_model(llm: LLM, counts: Counts) -> None:
    evaluate("gsm8k", llm, **CHOICES)
    assert counts.take() == (1, 1, 1)
    with llm.keep("A prefix that lies in the cache", name="kept"):
        counts.take()
        evaluate("gsm8k", llm, **CHOICES)
        fits, plans, most = counts.take()
        assert (fits, most) == (1, 1) and plans == 2  # segments end where the kept prefix does


def test_so_do_scored_choices(treegen: Command, counts: Counts, tmp_path: Path) -> None:
    how = ("eval", "arc-easy", "-M", "demo", "--limit", "3", "--quiet", "-o", tmp_path / "run")
    assert treegen(*how).code == 0
    assert counts.take() == (1, 1, 1)
    whole = (tmp_path / "run" / "results.json").read_text()
    cut(tmp_path / "run", 1)
    assert treegen("eval", "--resume", tmp_path / "run", "--quiet").code == 0
    fits, plans, most = counts.take()
    assert (fits, most) == (1, 1) and plans == 2  # of all prompts, and of those that are left
    assert open_run(tmp_path / "run").results["report"] == json_report(whole)


def json_report(text: str) -> Any:
    import json

    return json.loads(text)["report"]


def test_so_do_prompts_that_are_shortened_or_only_planned(
    treegen: Command, counts: Counts, tmp_path: Path
) -> None:
    shown = treegen("plan", "gsm8k", "--limit", "2", "--quiet", "--write-out")
    assert shown.code == 0 and counts.take() == (1, 1, 1)
    # The few-shot examples do not fit with so many tokens, so they are left out.
    args = ("apps", "--limit", "2", "-n", "1", "--max-tokens", "4000", "--quiet", "--write-out")
    shown = treegen("plan", *args)
    assert shown.code == 0, shown.err
    assert counts.take() == (1, 1, 1)


# Scoring


class Scorer:
    """Counts the calls of a task's `score`, and may interrupt one of them."""

    def __init__(self, task: type, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self.interrupt_at = 0, -1
        score: Callable[..., Mapping[str, Verdict]] = task.score  # type: ignore[attr-defined]

        def counted(this: Any, problem: Any, text: str) -> Mapping[str, Verdict]:
            self.num += 1
            if self.num == self.interrupt_at:
                raise KeyboardInterrupt
            return score(this, problem, text)

        monkeypatch.setattr(task, "score", counted)

    def take(self) -> int:
        """Return the number of calls since the last time."""
        num, self.num = self.num, 0
        return num


def test_evaluate_scores_each_sample_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = Scorer(GSM8K, monkeypatch)
    run = evaluate("gsm8k", limit=2, num_samples=2, max_tokens=8, progress=False)
    assert scorer.take() == 4
    assert run.accuracy is not None and len(run.samples()) == 4
    evaluate("gsm8k", llm, stop_when="decided", stop_batch=1, votes=["logprob"], **CHOICES)
    assert 2 <= scorer.take() <= 4
    evaluate(GSM8K(), llm, data=run.view.source, **CHOICES)
    assert scorer.take() == 4


@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_commands_score_each_sample_once(
    task: str, treegen: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scorer, run = Scorer(type(get_task(task)), monkeypatch), tmp_path / "run"
    assert treegen("eval", task, "-M", tiny, *SMALL, "-f", "1", "-o", run).code == 0
    assert scorer.take() == 4
    assert treegen("score", run, "--quiet").code == 0
    assert scorer.take() == 4
    assert treegen("show", run, "--quiet").code == 0
    assert scorer.take() == 4
    cut(run, 3)  # these samples are other ones than a call has scored
    assert treegen("eval", "--resume", run, "--quiet").code == 0
    assert scorer.take() == 4


@pytest.mark.parametrize("how", [(), STOPPING], ids=["all", "stopping"])
def test_a_resumed_run_scores_its_new_samples_only(
    how: tuple[str, ...],
    treegen: Command,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(verdict_cache.FOLDER, str(tmp_path / "cache"))
    scorer, run, whole = Scorer(GSM8K, monkeypatch), tmp_path / "run", tmp_path / "whole"
    assert treegen("eval", "gsm8k", "-M", tiny, *SMALL, *how, "-o", whole).code == 0
    total = scorer.take()
    scorer.interrupt_at = 3
    assert treegen("eval", "gsm8k", "-M", tiny, *SMALL, *how, "-o", run).code == 1
    assert scorer.take() >= 3
    with RunDir.open(run) as stored:
        kept = len(stored.done)
    scorer.interrupt_at = -1
    assert treegen("eval", "--resume", run, "--quiet").code == 0
    assert scorer.take() == total - kept + 1  # the sample whose scoring was interrupted
    for _ in range(2):
        assert treegen("eval", "--resume", run, "--quiet").code == 0
        assert scorer.take() == 0
    results = [open_run(path).results for path in (run, whole)]
    assert results[0]["report"] == results[1]["report"]


def test_choices_are_scored_once_each(
    treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = type(get_task("arc-easy"))
    monkeypatch.setattr(task, "score", task.score)  # so that `Scorer` patches this class
    scorer = Scorer(task, monkeypatch)
    evaluate("arc-easy", "demo", limit=3, progress=False, output=tmp_path / "run")
    # The most likely choice, and the most likely by length where it is another one.
    assert 3 <= scorer.take() <= 6
