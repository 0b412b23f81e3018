"""Logs that were corrupt or forged: a clear error, or a run that every reader can read."""

import copy
import json
import math
import os
import random
import shutil
import signal
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from foreign_logs import (
    STAMP,
    chosen_rows,
    exported_rows,
    generated_rows,
    inspect_log,
    inspect_sample,
    results_of,
    write_inspect,
    write_lm_eval,
)
from json_places import find_holder, places
from report_cases import content, make_run

from treegen.errors import InputError, RunError, TreegenError
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.rescoring import rescore_run
from treegen.report.compare import compare_runs
from treegen.report.exchange import FORMATS, export_run, import_log
from treegen.report.html_page import _render
from treegen.report.load import load_run
from treegen.report.run_document import get_vote_shares, problem_text, problems_text, run_document

DEEP: Any = []
for _ in range(60):
    DEEP = [DEEP]
VALUES: Sequence[Any] = (
    None,
    True,
    False,
    -5,
    0,
    1,
    1.7,
    -0.5,
    2**70,
    10**12,
    math.nan,
    math.inf,
    "",
    "no",
    "C",
    "0.5",
    "..",
    "\x00",
    "\ud800",
    "x" * 5000,
    [],
    {},
    [1],
    ["a", 2],
    {"a": 1},
    DEEP,
    [[]],
    [None],
)


def mutated(value: Any, rng: random.Random) -> Any:
    """A JSON value with one or two changes."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 1, 2))):
        place = rng.choice(list(places(value)))
        holder, last = find_holder(value, place), place[-1]
        match rng.randrange(6):
            case 0 if isinstance(holder, dict):
                del holder[last]
            case 1 if isinstance(holder, list):
                holder.insert(last, copy.deepcopy(holder[last]))
            case 2 if isinstance(holder, dict):
                holder[str(rng.choice(("..", "a/b", "", "crc", "id")))] = holder[last]
            case 3:
                holder[last] = str(holder[last])
            case _:
                holder[last] = copy.deepcopy(rng.choice(VALUES))
    return value


def corrupt(data: bytes, rng: random.Random) -> bytes:
    """The bytes of a file with some of them lost, changed or doubled."""
    a, b = sorted(rng.randrange(len(data)) for _ in range(2))
    match rng.randrange(4):
        case 0:
            return data[:a]
        case 1:
            return data[:a] + bytes([rng.randrange(256)]) + data[a + 1 :]
        case 2:
            return data[:a] + data[b:]
        case _:
            return data[:b] + data[a:]


def read_all(path: Path) -> None:
    """Read a run as `show`, `score`, `compare`, `report` and `export` do."""
    view = load_run(path)
    shares = get_vote_shares(view, view.filters[0]) if view.filters else []
    json.dumps(run_document(view, shares), allow_nan=False)
    problems_text(view, shares, full=True)
    for problem in view.problems:
        problem_text(view, problem, view.filters[0] if view.filters else "", full=True)
    rescore_run(path, {}, Listener())
    json.dumps(json.loads((path / "results.json").read_text()), allow_nan=False)
    try:
        json.dumps(compare_runs(view, view, partial=True).to_json(), allow_nan=False)
    except InputError as error:
        assert "both" in str(error)  # nothing is finished or scored in both
    "".join(_render([view], {"run-1": []}, []))
    for to in FORMATS:
        try:
            export_run(path, to, path.parent / f"{path.name}.{to}" / "x.eval")
        except InputError as error:
            assert "is not a valid file name" in str(error)


def survives(log: Path, out: Path) -> bool:
    """Whether a log is imported and then read by all; else it must be an error in one line."""
    try:
        runs = import_log(log, out)
    except TreegenError as error:
        assert "\n" not in str(error) and len(str(error)) < 1500
        assert not out.exists()
        return False
    for run in runs:
        read_all(run)
    return True


KINDS = {"generated": generated_rows(), "chosen": chosen_rows(), "exported": exported_rows()}


def lm_eval_survives(kind: str, seed: int, folder: Path) -> bool:
    rng = random.Random(f"{kind} {seed}")
    rows, results = copy.deepcopy(KINDS[kind]), results_of([kind])
    text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
    match rng.randrange(6):
        case 0 | 1 | 2:
            place = rng.randrange(len(rows))
            rows[place] = mutated(rows[place], rng)
            text = "".join(f"{json.dumps(row)}\n" for row in rows).encode()
        case 3 | 4:
            results = mutated(results, rng)
        case _:
            text = corrupt(text, rng)
    folder.mkdir()
    (folder / f"samples_{kind}_{STAMP}.jsonl").write_bytes(text)
    log = folder / f"results_{STAMP}.json"
    log.write_text(json.dumps(results))
    return survives(log, folder / "run")


def samples() -> list[dict[str, Any]]:
    return [
        inspect_sample(
            number,
            epoch,
            {"match": "C" if number % 2 else "I", "parts": {"a": 0.5, "b": 1}, "said": "yes"},
        )
        for number in range(3)
        for epoch in (1, 2)
    ]


def inspect_survives(seed: int, folder: Path) -> bool:
    rng = random.Random(f"inspect {seed}")
    folder.mkdir()
    if seed % 3:
        log = folder / "log.json"
        log.write_text(json.dumps(mutated(inspect_log(samples(), 2), rng)))
    else:
        log = write_inspect(folder / "log.eval", samples(), 2)
        log.write_bytes(corrupt(log.read_bytes(), rng))
    return survives(log, folder / "run")


@pytest.mark.parametrize("kind", KINDS)
def test_mutated_logs_of_lm_eval(kind: str, tmp_path: Path) -> None:
    assert survives(write_lm_eval(tmp_path / "whole", {kind: KINDS[kind]}), tmp_path / "run")
    taken = [lm_eval_survives(kind, seed, tmp_path / str(seed)) for seed in range(16)]
    assert 2 < sum(taken) < 14


def test_mutated_logs_of_inspect(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    taken = [inspect_survives(seed, tmp_path / str(seed)) for seed in range(24)]
    assert 4 < sum(taken) < 22


@pytest.mark.soak
@pytest.mark.parametrize("kind", [*KINDS, "inspect"])
def test_many_mutated_logs(kind: str, tmp_path: Path) -> None:
    for seed in range(1000, 2500):
        folder = tmp_path / str(seed)
        if kind == "inspect":
            inspect_survives(seed, folder)
        else:
            lm_eval_survives(kind, seed, folder)


def change(**fields: Any) -> list[dict[str, Any]]:
    """The lines of a task, the second of which has other fields."""
    rows = generated_rows(filters=("strict",))
    rows[1] |= fields
    return rows


def respond(**fields: Any) -> list[dict[str, Any]]:
    """The lines of an export, whose second response of the second line has other fields."""
    rows = exported_rows()
    rows[1]["by_response"][1] |= fields
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (change(doc_id=1.7), r"line 2: doc_id: .*integer, got 1\.7"),
        (change(doc_id="1"), r"line 2: doc_id: .*integer, got '1'"),
        (change(doc_id=True), "line 2: doc_id"),
        (change(doc_id=-1), "line 2: doc_id: .*greater than or equal to 0"),
        (change(filter=None), "line 2: filter"),
        (change(resps="text"), "line 2: resps"),
        (change(resps=[]), "line 2: resps"),
        (change(resps=[[]]), "line 2: resps has a request without responses"),
        (change(resps=[["a", 5]]), "line 2: resps must contain strings"),
        (change(resps=[[["x", "y"]]]), "line 2: resps must contain strings, or"),
        (change(metrics="exact_match"), "line 2: metrics"),
        (change(metrics=["acc"]), "line 2: metrics names 'acc'"),
        (respond(correct="no"), "line 2: by_response.1.correct: .*boolean, got 'no'"),
        (respond(tokens=-5), "line 2: by_response.1.tokens: .*got -5"),
        (respond(answer=5), "line 2: by_response.1.answer: .*string, got 5"),
        (respond(answer=None, correct=True), "line 2: by_response has a correct response without"),
        (respond(credit=2), "line 2: by_response.1.credit"),
        (respond(index=10**12), "line 2: by_response.1.index"),
        (respond(index=0), "line 2: by_response has two responses with the same index"),
        (respond(metrics=[]), r"line 2: by_response\.1\.metrics: .*got \[\]"),
        (
            [row | {"metrics": [*row["metrics"], "f1"], "f1": 0.5} for row in exported_rows()],
            "line 1: the line has several metrics, so each response of by_response must have",
        ),
        ([*change(), change()[1]], "line 4: document 1 already has a line for the filter 'strict'"),
        (
            [*change(), change(filter="b", target="7")[1]],
            "line 4 and .*line 2 have the same doc_id 1, but different",
        ),
        (
            [*change(), change(filter="b", resps=[["other"]])[1]],
            "line 4 and .*line 2 have the same doc_id 1, but different",
        ),
        ([*exported_rows(), exported_rows()[0] | {"doc_id": 9}], "two problems with the id 'p0'"),
    ],
)
def test_a_forged_line_is_named(rows: list[dict[str, Any]], message: str, tmp_path: Path) -> None:
    log = write_lm_eval(tmp_path / "log", {"task": rows})
    with pytest.raises(InputError, match=message):
        import_log(log, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_command_prints_the_error_in_one_line(tmp_path: Path, treegen: Command) -> None:
    log = write_lm_eval(tmp_path / "log", {"task": respond(correct="no")})
    done = treegen("import", log, "-o", tmp_path / "run")
    assert done.code == 2 and done.err.count("\n") == 1 and "line 2" in done.err
    (tmp_path / "log" / f"samples_task_{STAMP}.jsonl").write_text("[" * 200_000)
    done = treegen("import", log, "-o", tmp_path / "run")
    assert done.code == 2 and done.err.count("\n") == 1 and "nested too deeply" in done.err
    log.write_text("[" * 200_000)
    done = treegen("import", log, "-o", tmp_path / "run")
    assert done.code == 2 and done.err.count("\n") == 1 and "nested too deeply" in done.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s["output"]["usage"].update(output_tokens=-5), r"sample 1, epoch 1: num_tokens"),
        (lambda s: s.update(epoch=0), r"sample 1, epoch 0: index"),
        (lambda s: s.update(epoch=10**12), "must have at most .* epochs, got 1000000000000"),
        (lambda s: s.update(id=2), "different inputs or targets for the sample '2'"),
        (lambda s: s.update(id="0"), "the number 0 and the text '0' as two different sample ids"),
        (lambda s: s.update(id=0, input="What is 0?", target="0"), "sample 0 of problem '0' twice"),
        (lambda s: s["scores"]["match"].update(answer=5), "cannot be read as an Inspect log"),
    ],
)
def test_a_forged_sample_is_named(change: Any, message: str, tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    samples = [inspect_sample(number, 1, {"match": "C"}) for number in range(3)]
    change(samples[1])
    with pytest.raises(InputError, match=message):
        import_log(write_inspect(tmp_path / "log.json", samples), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_small_log_that_unpacks_to_much_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("inspect_ai")
    log = write_inspect(tmp_path / "log.eval", samples(), 2)
    assert import_log(log, tmp_path / "whole")
    with zipfile.ZipFile(log, "a", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("samples/9_epoch_1.json", " " * 200_000_000)
    assert log.stat().st_size < 1_000_000
    with pytest.raises(InputError, match="unpacks to 190 MiB"):
        import_log(log, tmp_path / "run")
    # An entry whose size is told as smaller than it is: no more than that is read.
    data = log.read_bytes().replace((200_000_000).to_bytes(4, "little"), b"\x00\x01\x00\x00")
    log.write_bytes(data)
    with pytest.raises(InputError, match="cannot be read as an Inspect log"):
        import_log(log, tmp_path / "run")


def test_unsupported_settings_of_a_log_are_left_out(tmp_path: Path, treegen: Command) -> None:
    def hot(results: dict[str, Any]) -> None:
        results["configs"]["task"]["generation_kwargs"] |= {"top_p": -1.0, "do_sample": True}

    log = write_lm_eval(tmp_path / "log", {"task": generated_rows()}, hot)
    done = treegen("import", log, "-o", tmp_path / "run")
    assert done.code == 0 and "top_p=-1.0 of the log is not supported by treegen" in done.err
    assert load_run(tmp_path / "run").info.identity["sampling"]["max_tokens"] == 64


def test_a_stored_verdict_has_its_types(tmp_path: Path) -> None:
    """Runs are edited by hand too."""
    from treegen.runs.record_format import decode_record, encode_record

    (run,) = import_log(
        write_lm_eval(tmp_path / "log", {"task": generated_rows()}), tmp_path / "run"
    )
    path = run / "samples.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    record = decode_record(lines[0])
    right = {"answer": "a", "correct": True}
    for verdict in (
        {**right, "answer": 5},
        {**right, "answer": None},
        {**right, "correct": "no"},
        {**right, "credit": 7},
        {"answer": "a"},
        {},
        5,
    ):
        line = encode_record({**record, "verdicts": {"strict": verdict}})
        path.write_bytes(b"".join([line, *lines[1:]]))
        with pytest.raises(TreegenError, match=r"verdicts|corrupt line"):
            load_run(run)


# Imports that are killed at any moment: no half run, nothing lost, and the next import works


FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link")


def import_and_kill(log: Path, out: Path, last_event: int | None) -> int:
    """Import in a child process that is killed at a file operation; return how many it had begun.

    Args:
        log: the log to import.
        out: the folder of runs to write.
        last_event: the number of the file operation before which the child is killed; None: never.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        count = 0

        def count_event(event: str, _: tuple[object, ...]) -> None:
            nonlocal count
            if event in FILE_EVENTS:
                count += 1
                os.write(writer, b".")
                if count == last_event:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count_event)
            import_log(log, out)
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        num_events = len(pipe.read())
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1]) == (last_event is not None)
    return num_events


def check(log: Path, out: Path) -> None:
    """Nothing is a run but what is whole, and what a kill has left hinders nobody."""
    found = [file.parent for file in out.glob("*/run.json")]
    for run in found:
        assert load_run(run).num_done == 40 and not load_run(run).notices
    for place in out.glob("*"):
        names = {path.name for path in place.iterdir()}
        # After a kill between the first file and run.json, which comes last, the files stay.
        if place not in found and any(not name.startswith(".import.") for name in names):
            shutil.rmtree(place)
    if len(found) < 2:
        for run in found:
            shutil.rmtree(run)
        assert len(import_log(log, out)) == 2
    else:  # a kill after the last run.json may leave scratch folders, which another call removes
        with pytest.raises(RunError, match="already contains a run"):
            import_log(log, out)
    for run in out.glob("*"):
        assert load_run(run).num_done == 40 and not list(run.glob(".import*"))


def kill_often(folder: Path, times: int, seed: int) -> None:
    rows = generated_rows(40, filters=("strict",))
    log = write_lm_eval(folder / "log", {"one": rows, "two": rows})
    make_run(folder / "runs" / "mine", num_problems=2, num_samples=1)
    before = content(folder / "runs")
    import_log(log, folder / "first")  # imports the modules that the children need
    num_events = import_and_kill(log, folder / "second", None)
    rng = random.Random(seed)
    for number in range(times):
        out = folder / str(number)
        last_event = rng.randint(1, num_events)
        assert import_and_kill(log, out, last_event) == last_event
        check(log, out)
        shutil.rmtree(out)
    assert content(folder / "runs") == before


def test_killed_imports(tmp_path: Path) -> None:
    kill_often(tmp_path, 12, 0)


@pytest.mark.soak
def test_many_killed_imports(tmp_path: Path) -> None:
    kill_often(tmp_path, 300, 1)
