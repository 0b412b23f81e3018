"""Runs of workers: the samples of one engine, whoever began them and whoever dies on the way."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, assert_same_samples, copy_part, results_of, run_command

from treegen import (
    LLM,
    AsyncLLM,
    Cluster,
    InputError,
    ModelWarning,
    WorkerError,
    evaluate,
    open_run,
    search_task,
)
from treegen.evals.config.eval_settings import resolve_eval_settings, stored_choices
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job, prepare_job
from treegen.evals.sampling import sample
from treegen.evals.scoring.results import write_results
from treegen.llm.cluster import worker_pool
from treegen.runs import RunDir

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="needs ray")
RUN = ["-L", "6", "-n", "12", "--max-tokens", "40", "--memory", "4MiB", "-b", "6"]
EVAL = ["eval", "gsm8k", *RUN, "-q"]


@pytest.fixture(scope="module")
def whole(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one engine."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    assert run_command(*EVAL, "-M", tiny, "-o", path) == 0
    return path


@pytest.fixture(scope="module")
def cluster(tiny: Path) -> Iterator[Cluster]:
    with Cluster(str(tiny), workers=2, memory="4MiB", max_rows=6) as started:
        yield started


def _go_on(path: Path, cluster: Cluster, *, kill: int = 0) -> int:
    """Continue a run by workers and kill some of them on the way; returns how many died."""
    with RunDir.open(path) as opened:
        job = load_job(resolve_eval_settings({}, stored_choices(opened.info)))
    settings = run_settings(job, dtype="float32", fingerprint=cluster.fingerprint)
    killed = 0
    with RunDir.resume(path, settings) as run:
        before = len(run.done)
        for now in sample(prepare_job(job, cluster.model_info), run, cluster):
            loaded = [s.loaded for s in cluster._pool.slots if s.loaded is not None]
            if killed < kill and loaded and now.done > before:
                before = now.done
                killed += 1
                os.kill(random.choice(loaded).pid, signal.SIGKILL)
        write_results(job, run)
    return killed


def test_workers_go_on_with_the_run_of_one_engine(
    whole: Path, cluster: Cluster, tmp_path: Path
) -> None:
    part = copy_part(whole, tmp_path / "part", 25, b'{"problem_id": "')
    _go_on(part, cluster)
    assert_same_samples(part, whole)
    results, expected = results_of(part), results_of(whole)
    assert results["report"] == expected["report"] and results["complete"]
    (last,) = results["parts"]
    assert [worker["name"] for worker in last["workers"]] == ["worker 0", "worker 1"]
    assert sum(worker["tokens"] for worker in last["workers"]) == last["decoded_tokens"]
    assert last["samples"] == 72 - 25


def test_one_engine_goes_on_with_the_run_of_workers(
    whole: Path, cluster: Cluster, treegen: Command, tmp_path: Path
) -> None:
    """Begun with two, killed with one of them on the way, and ended with none."""
    path = copy_part(whole, tmp_path / "run", 0)
    assert _go_on(path, cluster, kill=1) == 1
    assert_same_samples(path, whole)
    part = copy_part(path, tmp_path / "part", 31)
    assert treegen("eval", "--resume", part, "-q").code == 0
    assert_same_samples(part, whole)


def test_searches_of_workers_are_those_of_one_engine(
    tiny: Path, cluster: Cluster, treegen: Command, tmp_path: Path
) -> None:
    """With the Ray that this process has already, which the command leaves as it is."""
    line = f"search countdown -m beam -L 6 --budget tokens=150 -M {tiny} --memory 4MiB -b 6 -q"
    one, two = tmp_path / "one", tmp_path / "two"
    assert treegen(line, "-o", one).code == 0
    done = treegen(line, "-o", two, "--workers", "2")
    assert done.code == 0, done.err
    assert _trees_of(two) == _trees_of(one)
    assert len(results_of(two)["parts"][-1]["workers"]) == 2
    assert cluster.generate(["still there"])


def _trees_of(path: Path) -> dict[str, list[tuple[object, ...]]]:
    records = map(json.loads, (path / "trees.jsonl").read_text().splitlines())
    return {
        r["problem_id"]: [(n["text"], n["parent_id"], n["n_tokens"]) for n in r["nodes"]]
        for r in records
    }


@pytest.mark.soak
def test_four_workers_draw_what_one_draws(
    whole: Path, cluster: Cluster, tiny: Path, tmp_path: Path
) -> None:
    """In a second cluster of this process, beside the first."""
    path = copy_part(whole, tmp_path / "run", 0)
    with Cluster(str(tiny), workers=4, memory="4MiB", max_rows=6) as four:
        assert (cluster.num_workers, four.num_workers) == (2, 4)
        _go_on(path, four)
    assert_same_samples(path, whole)


def test_if_no_worker_is_left_the_run_says_so_and_goes_on_later(
    whole: Path, tiny: Path, treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_pool, "MAX_FAILURES", 1)
    path = copy_part(whole, tmp_path / "run", 0)
    with (
        Cluster(str(tiny), workers=1, memory="4MiB", max_rows=6) as alone,
        pytest.raises(WorkerError, match="no worker is left"),
    ):
        _go_on(path, alone, kill=1)
    assert treegen("eval", "--resume", path, "-q").code == 0
    assert_same_samples(path, whole)


def test_a_worker_that_dies_while_it_starts_is_restarted(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    died, options = tmp_path / "died", dict[str, Any](workers=2, memory="4MiB")

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def die_once() -> None:
        with contextlib.suppress(FileExistsError):
            died.touch(exist_ok=False)
            die()

    with pytest.warns(ModelWarning, match=r"worker \d is restarted: its process died"):
        started = Cluster(str(tiny), before=[die_once], **options)
    with started:
        assert started.num_workers == 2 and started.generate(["one", "two"])
    monkeypatch.setattr(worker_pool, "MAX_FAILURES", 1)
    with (
        pytest.warns(ModelWarning, match=r"worker \d is given up: its process died"),
        pytest.raises(WorkerError, match=r"no worker is left .*worker 1: its process .* again"),
    ):
        Cluster(str(tiny), before=[die], **options)


def _descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that they have.

    Not Ray's agents, which try for a minute to tell a head that is gone of the end.
    """
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2]
        if state != "Z" and "(ray::Dashboard" not in text and "(ray::RuntimeEnv" not in text:
            parents[int(text.split()[0])] = int(parent)
    found, new = set[int](), {pid}
    while new:
        new = {child for child, parent in parents.items() if parent in new} - found
        found |= new
    return found


def _wait_for(path: Path, lines: int, process: "subprocess.Popen[bytes]") -> None:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        samples = path / "samples.jsonl"
        if samples.exists() and samples.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.01)


@pytest.mark.soak
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_command_that_is_killed_takes_its_ray_along(
    number: signal.Signals, whole: Path, tiny: Path, treegen: Command, tmp_path: Path
) -> None:
    """And what it had stored is gone on with, without workers."""
    path = tmp_path / "run"
    where: list[str] = ["-M", str(tiny), "-o", str(path), "--workers", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "treegen", *EVAL, *where],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    _wait_for(path, 2, process)
    started = _descendants(process.pid)
    if number == signal.SIGINT:  # as a terminal sends it, to Ray's processes too
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert b"Traceback" not in err and b"raylet" not in out + err
    if process.returncode != 0:  # else it was quicker
        assert process.returncode in (-number, 128 + number), err
        assert len(started) >= 4
    deadline = time.monotonic() + 60
    while left := {pid for pid in started if pid in _alive()}:
        assert time.monotonic() < deadline, f"processes of Ray are left: {left}"
        time.sleep(0.1)
    assert treegen("eval", "--resume", path, "-q").code == 0
    assert_same_samples(path, whole)


def _alive() -> set[int]:
    return _descendants(0) | _descendants(1)


def test_evaluate_takes_a_cluster(whole: Path, cluster: Cluster, tmp_path: Path) -> None:
    resumed = copy_part(whole, tmp_path / "part", 25, b'{"problem_id": "')
    run = evaluate(model=cluster, resume=resumed, progress=False)
    assert_same_samples(resumed, whole)
    assert run.view.info.fingerprint == open_run(whole).view.info.fingerprint
    choices: dict[str, Any] = {"limit": 2, "budget": {"tokens": 60}, "progress": False}
    found = search_task("countdown", cluster, method="sample", **choices)
    assert len(found.view.trees) == 2 and cluster.num_workers == 2


def test_what_takes_an_llm_runs_on_workers_or_says_why_not(cluster: Cluster, tiny: Path) -> None:
    with pytest.raises(InputError, match="AsyncLLM does not support a Cluster"):
        AsyncLLM(cluster)
    assert not isinstance(cluster, LLM)
    with LLM(str(tiny), memory="4MiB") as llm:
        assert (
            cluster.model_info.spec == llm.model_info.spec
            and cluster.fingerprint == llm.fingerprint
        )
        assert cluster.model_info.dtype == llm.model_info.dtype
        prompts, params = ["one", "two"], {"max_tokens": 4, "seed": 0, "n": 2}
        outputs = zip(cluster.generate(prompts, params), llm.generate(prompts, params), strict=True)
        for actual, expected in outputs:
            for one, other in zip(actual, expected, strict=True):
                assert (one.tokens, one.text) == (other.tokens, other.text)
                # A worker may decode a row alone. A product of one row adds up in another order.
                assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.skipif(find_spec("pyarrow") is None, reason="needs pyarrow")
def test_texts_are_scored_on_workers(cluster: Cluster, tmp_path: Path) -> None:
    from treegen.integrations.score_texts import score_texts

    path = tmp_path / "texts.jsonl"
    path.write_text("".join(f'{{"text": "Text {number}"}}\n' for number in range(9)))
    (*_, last) = score_texts(cluster, path, tmp_path / "scores", top=2)
    assert last.texts == 9 and 0 < last.computed < last.tokens  # shared tokens count once


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")
def test_lm_eval_runs_on_workers(cluster: Cluster, tiny: Path) -> None:
    from lm_eval.api.instance import Instance

    from treegen.integrations.lm_eval import TreegenLM

    pairs = [("a b", " c"), ("a b", " d e"), ("", "x")]
    requests = [Instance("loglikelihood", {}, pair, 0) for pair in pairs]
    with LLM(str(tiny), memory="4MiB") as llm:
        alone, many = TreegenLM(llm), TreegenLM(cluster)
        both = zip(many.loglikelihood(requests), alone.loglikelihood(requests), strict=True)
        for (one, greedy), (other, also) in both:
            assert one == pytest.approx(other, abs=1e-5) and greedy == also
        assert many.max_length == alone.max_length
        assert many.get_model_info() == alone.get_model_info()
