"""Verdicts that are kept: they are those of judging anew, whatever has become of the run."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from report_cases import make_run

from treegen.errors import RunError
from treegen.evals import task_calls
from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.identity import load_stored_job
from treegen.evals.job import Job
from treegen.evals.scoring import run_verdicts, verdict_cache
from treegen.evals.verdict import MetricVerdict, Verdict
from treegen.report.load import load_run
from treegen.runs import RunDir, RunSettings
from treegen.runs.record_file import RecordFile
from treegen.runs.record_format import decode_record, encode_record


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where verdicts are kept, also those of small runs."""
    monkeypatch.setenv(verdict_cache.FOLDER, str(tmp_path / "kept"))
    monkeypatch.setattr(verdict_cache, "_MIN_CACHED_SAMPLES", 1)
    return tmp_path / "kept"


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are judged."""
    texts: list[str] = []
    judge = task_calls.score_record

    def noted(task: Any, problem: Any, record: Any) -> Any:
        texts.append(record["text"])
        return judge(task, problem, record)

    monkeypatch.setattr(run_verdicts, "score_record", noted)
    return texts


def read_scores(path: Path) -> Any:
    """What a run comes to: its report, and the verdicts on each sample."""
    view = load_run(path)
    verdicts = [(s.problem_id, s.index, dict(s.verdicts or {})) for s in view.samples]
    return view.report, verdicts, view.filters, view.notices


def anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setenv(verdict_cache.FOLDER, "")
        return read_scores(path)


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.verdicts"))


def lines_of(path: Path) -> list[bytes]:
    return (path / "samples.jsonl").read_bytes().splitlines(keepends=True)


def edited(line: bytes, rng: random.Random) -> bytes:
    """A line whose text is another one, with a right crc."""
    record = decode_record(line)
    answer = rng.choice(["The answer is 3.", "#### 7", "nothing", ""])
    return encode_record({**record, "text": f" {record['text'][:9]} {answer}"})


def append(lines: list[bytes], rng: random.Random) -> list[bytes]:
    record = decode_record(lines[-1])
    indices = [decode_record(line)["sample_index"] for line in lines]
    return [*lines, encode_record({**record, "sample_index": max(indices) + 1})]


def edit(lines: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(lines))
    return [*lines[:at], edited(lines[at], rng), *lines[at + 1 :]]


def tear(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return [*lines[:-1], lines[-1][: rng.randrange(1, len(lines[-1]))]]


def drop(lines: list[bytes], rng: random.Random) -> list[bytes]:
    at = rng.randrange(len(lines))
    return [*lines[:at], *lines[at + 1 :]]


def repeat(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return [*lines, rng.choice(lines)]


def shuffle(lines: list[bytes], rng: random.Random) -> list[bytes]:
    return rng.sample(lines, len(lines))


def swap(lines: list[bytes], rng: random.Random) -> list[bytes]:
    """The texts of two samples change places, so that size and texts are the same."""
    first, second = rng.sample(range(len(lines)), 2)
    a, b = (decode_record(lines[at]) for at in (first, second))
    new = dict(enumerate(lines))
    new[first] = encode_record({**a, "text": b["text"]})
    new[second] = encode_record({**b, "text": a["text"]})
    return list(new.values())


CHANGES = (append, edit, tear, drop, repeat, shuffle, swap)


@pytest.mark.parametrize("seed", range(6))
def test_kept_verdicts_are_those_of_judging_anew(
    seed: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    path = make_run(tmp_path / "run", num_problems=7, num_samples=6, seed=seed)
    states = [lines_of(path)]
    for number in range(12):
        # Now and then a state of before is there again, whose verdicts are kept.
        change = rng.choice(CHANGES)
        states.append(change(rng.choice(states), rng) if number % 3 else rng.choice(states))
        while not states[-1][-1].endswith(b"\n") and rng.random() < 0.5:
            states[-1] = states[-1][:-1]  # mended, as a resume does it
        (path / "samples.jsonl").write_bytes(b"".join(states[-1]))
        wanted = anew(path, monkeypatch)
        for _ in range(2):
            assert read_scores(path) == wanted
        states = [state for state in states if state[-1].endswith(b"\n")]
    assert files(folder)


@pytest.mark.usefixtures("undrawn")
def test_a_run_is_judged_once(
    folder: Path, judged: list[str], tmp_path: Path, treegen: Command, tiny: Path
) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4, checkpoint=tiny)
    before = sorted(os.listdir(path))
    first = treegen("show", path)
    assert len(judged) == 20 and len(files(folder)) == 1
    assert sorted(os.listdir(path)) == before  # nothing in the run
    judged.clear()
    assert treegen("show", path) == first
    for command in (["report", "--no-plots"], ["replay"], ["eval", "--resume"]):
        assert treegen(*command, path).code == 0
    assert treegen("compare", path, path, "--no-plots").code == 0
    assert not judged
    resumed = (path / "results.json").read_bytes()
    assert treegen("score", path).code == 0
    assert len(judged) == 20  # which is what it is for
    assert (path / "results.json").read_bytes() == resumed
    assert len(files(folder)) == 1


def test_what_is_kept_of_a_copy_serves_it(folder: Path, judged: list[str], tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    wanted = read_scores(path)
    path.rename(tmp_path / "moved")
    judged.clear()
    assert read_scores(tmp_path / "moved") == wanted
    assert not judged


@pytest.mark.parametrize("spoil", ["cut", "flip", "empty", "other", "none"])
def test_a_corrupt_file_counts_as_none(
    spoil: str, folder: Path, judged: list[str], tmp_path: Path
) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    wanted = read_scores(path)
    (file,) = files(folder)
    whole = file.read_bytes()
    spoiled = {
        "cut": whole[:-9],
        "flip": whole.replace(b"true", b"null", 1),
        "empty": b"",
        "other": whole[:65] + json.dumps({"verdicts": []}).encode(),
        "none": b"\xff" * 99,
    }
    file.write_bytes(spoiled[spoil])
    judged.clear()
    assert read_scores(path) == wanted
    assert len(judged) == 20
    assert file.read_bytes() == whole


def test_no_verdicts_of_other_samples_are_taken(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    wanted = read_scores(path)
    digest = RecordFile.digest
    first, *others = lines_of(path)
    record = decode_record(first)
    line = encode_record({**record, "text": record["text"][::-1]})  # as long as it was

    def then_changed(file: RecordFile) -> str:
        found = digest(file)
        file.path.write_bytes(b"".join([line, *others]))
        return found

    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "digest", then_changed)
        with pytest.raises(RunError, match="was changed while treegen read the run"):
            read_scores(path)
    assert read_scores(path) == anew(path, monkeypatch) != wanted
    (path / "samples.jsonl").write_bytes(b"".join([first, *others]))
    assert read_scores(path) == wanted


def _job(path: Path) -> Job:
    with RunDir.open(path) as run:
        return load_stored_job({}, run)


def _other_problem(job: Job, **changes: Any) -> Job:
    first, *others = job.data.problems
    return replace(job, data=replace(job.data, problems=(replace(first, **changes), *others)))


OTHERS: dict[str, Callable[[Job], Job]] = {
    "answer": lambda job: _other_problem(job, answer="12345"),
    "metadata": lambda job: _other_problem(job, metadata={"solution": "another"}),
    "fewer": lambda job: replace(job, data=replace(job.data, problems=job.data.problems[:-1])),
    "arguments": lambda job: replace(
        job,
        settings=resolve_eval_settings({"task": "gsm8k", "model": "m", "extra": {"form": "cot"}}),
    ),
    "task": lambda job: replace(job, task=type("Other", (type(job.task),), {"version": "other"})()),
}


@pytest.mark.parametrize("other", OTHERS)
def test_what_verdicts_follow_from_names_them(other: str, tmp_path: Path) -> None:
    job = _job(make_run(tmp_path / "run", num_problems=5, num_samples=4))
    assert verdict_cache._content(job) == verdict_cache._content(_job(tmp_path / "run"))
    assert verdict_cache._content(OTHERS[other](job)) != verdict_cache._content(job)


def test_code_and_libraries_name_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = _job(make_run(tmp_path / "run", num_problems=5, num_samples=4))
    before = verdict_cache._content(job)
    for name, other in (("_code", lambda: "other"), ("_version", lambda library: "0")):
        with monkeypatch.context() as patch:
            patch.setattr(verdict_cache, name, other)
            assert verdict_cache._content(job) != before
    assert verdict_cache._content(job) == before


def test_only_plain_verdicts_of_own_tasks_are_kept(folder: Path, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    job = _job(path)
    with RunDir.open(path) as run:
        assert verdict_cache.VerdictCache.of(job, run)
        for task in (
            "tasks.py:Mine",
            "lm-eval:gsm8k",
            "path/task.yaml",
            "somebody-elses",
            job.task,
        ):
            settings = replace(job.settings, task=task)
            assert verdict_cache.VerdictCache.of(replace(job, settings=settings), run) is None
    cache = verdict_cache.VerdictCache(job, folder)
    right = Verdict("1", True)
    cache.write("0", [{"numeric": MetricVerdict("1", True), "strict-match": right}])
    cache.write("0", [{"numeric": right, "strict-match": right, "another": right}])
    assert not files(folder) and cache.read("0") is None
    found = {"numeric": Verdict("1/2", True, 0.5), "strict-match": Verdict(None, False)}
    found["flexible-extract"] = Verdict("\ud800", False)
    cache.write("0", [found, found])
    assert cache.read("0") == [found, found] and cache.read("1") is None


def test_small_unfinished_and_stopping_runs_are_judged_each_time(
    folder: Path, judged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping = make_run(
        tmp_path / "stop", num_problems=5, num_samples=4, stop_when="decided:0.9", stop_batch=2
    )
    load_run(stopping)
    load_run(make_run(tmp_path / "part", num_problems=5, num_samples=5, done=[4] * 5))
    monkeypatch.setattr(verdict_cache, "_MIN_CACHED_SAMPLES", 21)
    load_run(make_run(tmp_path / "small", num_problems=5, num_samples=4))
    assert len(judged) == 60 and not files(folder)


def test_a_sample_that_is_stored_later_has_its_verdicts_too(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_problems=2, num_samples=2)
    job = _job(path)
    with RunDir.open(path) as run:
        info, records = run.info, list(run.records())
    settings = RunSettings(
        identity=info.identity, problem_ids=info.problem_ids, planned=info.planned
    )
    verdicts = run_verdicts.RunVerdicts(job)
    with RunDir.create(tmp_path / "copy", settings) as run:
        for record in records[:-1]:
            verdicts.append(run, record)
        assert len(list(verdicts.read_unified(run))) == 3
        verdicts.append(run, records[-1])
        assert [record for record, *_ in verdicts.read_unified(run)] == records


def test_the_files_have_a_bound(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    cache = verdict_cache.VerdictCache(_job(path), folder)
    found = dict.fromkeys(("numeric", "strict-match", "flexible-extract"), Verdict("1", True))
    for number in range(4):
        cache.write(str(number), [found])
        os.utime(cache._path(str(number)), ns=(number, number))
    assert cache.read("0")  # which is now the one that was read last
    monkeypatch.setattr(verdict_cache, "_MAX_BYTES", 3 * files(folder)[0].stat().st_size)
    cache.write("4", [found])
    assert [cache.read(str(number)) is not None for number in range(5)] == [1, 0, 0, 1, 1]


def test_samples_are_read_once_where_nothing_is_kept(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    with monkeypatch.context() as patch:
        patch.setattr(RecordFile, "digest", lambda _: pytest.fail("the file is read once more"))
        before = read_scores(path)
    assert read_scores(path) == before and len(files(folder)) == 1


@pytest.mark.parametrize("where", ["a file", "nowhere", "relative", "too long"])
def test_without_a_folder_all_is_judged(
    where: str, judged: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    named = {"a file": str(tmp_path / "file"), "nowhere": "", "relative": "here"}
    named["too long"] = str(tmp_path / ("x" * 300))
    monkeypatch.setattr(verdict_cache, "_MIN_CACHED_SAMPLES", 1)
    monkeypatch.setenv(verdict_cache.FOLDER, named[where])
    monkeypatch.chdir(tmp_path)
    path = make_run(tmp_path / "run", num_problems=5, num_samples=4)
    assert read_scores(path) == read_scores(path)
    assert len(judged) == 40 and not (tmp_path / "here").exists()


def test_the_folder_is_that_of_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(verdict_cache.FOLDER)
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert verdict_cache._folder() == Path("/caches/treegen")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/ann")
    assert verdict_cache._folder() == Path("/home/ann/.cache/treegen")


def test_processes_at_once(folder: Path, tmp_path: Path) -> None:
    path = make_run(tmp_path / "run", num_problems=40, num_samples=25)
    command = [sys.executable, "-m", "treegen", "show", str(path), "-q"]
    begun = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
    found = {process.communicate()[0] for process in begun}
    assert len(found) == 1 and all(process.returncode == 0 for process in begun)
    assert subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout in found
    assert len(os.listdir(folder)) == 1
