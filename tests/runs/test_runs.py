"""A run stopped at any byte ends, after resuming, with the samples of an undisturbed one."""

import errno
import io
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.common.files import create_locked, sweep
from treegen.common.signals import SIGNALS
from treegen.errors import InputError, RunError, RunInUseError
from treegen.runs import (
    RunDir,
    RunSettings,
    SearchRunDir,
    StopFlag,
    graceful_signals,
    open_for_append,
    record_file,
    versions,
)
from treegen.runs.files import Lock, check_directory
from treegen.runs.record_file import RecordFile
from treegen.runs.record_format import encode_record
from treegen.runs.settings import SCHEMA, from_json

HOSTILE_IDS = (
    "../../etc/passwd",
    "line\nbreak\r\n",
    "\u2028separator\u2029\x85",
    "\ud800 lone \udfff",
    '","crc":"00000000"}',
    "\x00nul\x1b[2J",
    "",
    "\u202egnirts",
    "\U0001f600",
    "a" * 100,
)


def settings(**changes: Any) -> RunSettings:
    given: dict[str, Any] = {
        "identity": {"temperature": 0.7, "seed": 0, "task": {"name": "gsm8k", "version": 1}},
        "problem_ids": HOSTILE_IDS,
        "planned": 2 * len(HOSTILE_IDS),
        "free": {"memory": "2GiB"},
    }
    return RunSettings(**given | changes)


def sample(problem_id: str, index: int) -> dict[str, Any]:
    return {
        "problem_id": problem_id,
        "sample_index": index,
        "seed": hash((len(problem_id), index)) % 2**63,
        "text": f"\ud83d step {index}\n\u2028 \x1b]0;x\x07 the answer is {index}",
        "logprob": -1.5 / (index + 3),
        "stop": None,
    }


SAMPLES = [sample(problem_id, index) for problem_id in HOSTILE_IDS for index in range(2)]


def key(record: Mapping[str, Any]) -> tuple[str, int]:
    return record["problem_id"], record["sample_index"]


def finish(path: Path, resumed: RunSettings | None = None) -> tuple[str, ...]:
    """Resume the run in `path`, add what it lacks, and return the notices."""
    with RunDir.resume(path, resumed or settings()) as run:
        for record in SAMPLES:
            if key(record) not in run.done:
                run.append(record)
        assert run.missing == 0
        return run.notices


def stored(path: Path) -> list[dict[str, Any]]:
    with RunDir.open(path) as run:
        return sorted(run.records(), key=key)


WANTED = sorted(SAMPLES, key=key)


@pytest.fixture
def fast(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where there is one, so that thousands of fsyncs cost nothing."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


@pytest.fixture
def run_path(fast: Path) -> Path:
    """A finished run."""
    path = fast / "run"
    with RunDir.create(path, settings()) as run:
        for record in SAMPLES:
            run.append(record)
    return path


def refusal(path: Path) -> str:
    """What resuming and opening both say when they refuse `path`, in one line."""
    with pytest.raises(RunError) as resumed:
        RunDir.resume(path, settings())
    with pytest.raises(RunError) as opened:
        RunDir.open(path)
    assert str(resumed.value) == str(opened.value)
    assert "\n" not in str(resumed.value)
    return str(resumed.value)


# The file of samples


def test_records_come_back_as_they_were_given(run_path: Path) -> None:
    with RunDir.open(run_path) as run:
        assert list(run.records()) == SAMPLES
        assert run.done == {key(record) for record in SAMPLES}
        assert (run.missing, run.notices) == (0, ())
    data = (run_path / "samples.jsonl").read_bytes()
    assert data.isascii()
    lines = data.split(b"\n")
    assert [json.loads(line)["problem_id"] for line in lines[:-1]] == [
        record["problem_id"] for record in SAMPLES
    ]


def edges(whole: bytes) -> list[int]:
    """Places in the first line, in the last two and in each problem's id; the others are alike."""
    ends = [place for place, byte in enumerate(whole) if byte == ord("\n")]
    ids = re.finditer(rb'"problem_id":.*"sample_index":0', whole)
    places = [range(*each.span()) for each in ids]
    return sorted({*range(ends[0] + 2), *range(ends[-3], len(whole))}.union(*places))


def test_cut_at_any_byte_a_run_resumes_to_the_same_samples(run_path: Path) -> None:
    samples = run_path / "samples.jsonl"
    whole = samples.read_bytes()
    for size in (*edges(whole), len(whole)):
        samples.write_bytes(whole[:size])
        lines = whole[:size].split(b"\n")
        with RunDir.resume(run_path, settings()) as run:
            # A last line that lacks only its newline is a whole record.
            lacks_newline = bool(lines[-1]) and whole[size : size + 1] == b"\n"
            kept = list(run.records())
            assert kept == SAMPLES[: len(lines) - 1 + lacks_newline], size
            asides = list(run_path.glob("samples.torn-*"))
            if lines[-1] and not lacks_newline:
                assert [aside.read_bytes() for aside in asides] == [lines[-1]], size
                assert f"(line {len(lines)}) " in run.notices[0]
            else:
                assert asides == [], size
        finish(run_path)
        assert samples.read_bytes() == whole, size
        for aside in asides:
            aside.unlink()


def test_a_changed_byte_is_found_or_does_no_harm(run_path: Path) -> None:
    samples = run_path / "samples.jsonl"
    whole = samples.read_bytes()
    last_line = whole.rindex(b"\n", 0, len(whole) - 1) + 1
    rng = random.Random(0)
    for position in edges(whole):
        for mask in (rng.randrange(1, 256), whole[position] ^ ord("\n")):
            if mask == 0:
                continue
            corrupt = bytearray(whole)
            corrupt[position] ^= mask
            samples.write_bytes(corrupt)
            line = whole.count(b"\n", 0, position) + 1
            if position < last_line - 1:
                assert f"samples.jsonl:{line}: " in refusal(run_path), position
                assert samples.read_bytes() == corrupt
            elif position >= last_line and mask == whole[position] ^ ord("\n"):
                # A newline inside the last line makes two bad lines of it, or at its end of one.
                with pytest.raises(RunError, match=rf"samples\.jsonl:{line}: "):
                    RunDir.open(run_path)
            else:
                # The last line, or the newline before it: set aside and sampled again.
                assert finish(run_path), position
                assert samples.read_bytes() == whole
    assert not list(run_path.glob("*.tmp"))


def test_zeros_after_a_power_failure_are_a_torn_line(run_path: Path) -> None:
    samples = run_path / "samples.jsonl"
    whole = samples.read_bytes()
    samples.write_bytes(whole[:-50] + bytes(5000))
    (notice,) = finish(run_path)
    assert "samples.torn-1" in notice and "(line 20) " in notice
    samples.write_bytes(whole[:-50] + bytes(5000))
    (notice,) = finish(run_path)
    assert "samples.torn-2" in notice
    assert stored(run_path) == WANTED


def test_reading_changes_nothing(run_path: Path) -> None:
    samples = run_path / "samples.jsonl"
    torn = samples.read_bytes()[:-5]
    samples.write_bytes(torn)
    names = set(os.listdir(run_path))
    with RunDir.open(run_path) as run:
        assert len(list(run.records())) == len(run.done) == 19
        assert "(line 20) " in run.notices[0]
        with pytest.raises(RunError, match="reading only"):
            run.append(SAMPLES[-1])
    assert samples.read_bytes() == torn
    assert set(os.listdir(run_path)) == names


@pytest.mark.parametrize(
    "line", [b"", b"{}", b"null", b"[1]", b'{"problem_id":"","sample_index":0}', b"\xff" * 9]
)
def test_a_line_that_is_no_record_is_refused_with_its_number(run_path: Path, line: bytes) -> None:
    samples = run_path / "samples.jsonl"
    lines = samples.read_bytes().split(b"\n")
    samples.write_bytes(b"\n".join([*lines[:7], line, *lines[7:]]))
    message = refusal(run_path)
    assert "samples.jsonl:8: corrupt line" in message
    # What the message says to do works.
    assert "delete this line" in message and f"resume={str(run_path)!r}" in message
    samples.write_bytes(b"\n".join(lines))
    finish(run_path)


def test_a_deleted_line_is_sampled_again(run_path: Path) -> None:
    samples = run_path / "samples.jsonl"
    lines = samples.read_bytes().split(b"\n")
    samples.write_bytes(b"\n".join(lines[:4] + lines[5:]))
    finish(run_path)
    assert stored(run_path) == WANTED


def test_identical_records_are_one(run_path: Path) -> None:
    samples = run_path / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(b"".join([*lines, lines[3], lines[0], lines[3]]))
    finish(run_path)
    with RunDir.open(run_path) as run:
        assert list(run.records()) == SAMPLES
        assert run.missing == 0


def test_a_file_that_was_appended_to_itself_is_read_in_linear_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_read = 0

    class Counted(io.FileIO):
        def readinto(self, buffer: Any, /) -> int | None:
            nonlocal num_read
            num = super().readinto(buffer)
            num_read += num or 0
            return num

    def open_counted(fd: int, mode: str, size: int = 8192) -> io.BufferedReader:
        return io.BufferedReader(Counted(fd), size)

    path = tmp_path / "samples.jsonl"
    lines = b"".join(
        encode_record({"problem_id": "a", "sample_index": i, "text": "x" * 10_000})
        for i in range(100)
    )
    path.write_bytes(2 * lines)
    monkeypatch.setattr(record_file, "open", open_counted, raising=False)
    assert len(RecordFile(path, writable=False).keys) == 100
    assert num_read < 10 * len(lines)


@pytest.mark.parametrize("change", [{"text": "other"}, {"logprob": None}, {"extra": 1}])
def test_different_records_for_one_sample_are_refused(
    run_path: Path, fast: Path, change: dict[str, Any]
) -> None:
    with RunDir.create(fast / "other", settings()) as other:
        other.append(SAMPLES[4] | change)
    with open(run_path / "samples.jsonl", "ab") as file:
        file.write((fast / "other" / "samples.jsonl").read_bytes())
    message = refusal(run_path)
    assert "lines 5 and 21" in message
    assert f"sample 0 of problem {HOSTILE_IDS[2]!r}" in message


def test_samples_of_another_run_are_refused(run_path: Path, fast: Path) -> None:
    with RunDir.create(fast / "other", settings(problem_ids=["q7"], planned=1)) as other:
        other.append(sample("q7", 0))
        with pytest.raises(RunError, match="'q8' is not a problem of the run"):
            other.append(sample("q8", 0))
    shutil.copy(fast / "other" / "samples.jsonl", run_path)
    assert "such as 'q7'" in refusal(run_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sample_index": -1}, "sample_index must be"),
        ({"sample_index": True}, "sample_index must be"),
        ({"sample_index": "0"}, "sample_index must be"),
        ({"crc": "x"}, "'crc'"),
        ({"logprob": float("nan")}, "record.logprob is nan"),
        ({"top": [{"x": float("inf")}]}, r"record\.top\[0\]\.x is inf"),
        ({"text": b"bytes"}, "record.text is a bytes"),
    ],
)
def test_a_record_that_could_not_be_read_back_is_not_written(
    fast: Path, change: dict[str, Any], message: str
) -> None:
    with RunDir.create(fast / "run", settings()) as run:
        with pytest.raises(InputError, match=message):
            run.append(SAMPLES[0] | change)
        run.append(SAMPLES[0])
        with pytest.raises(RunError, match="already exists"):
            run.append(SAMPLES[0])
        assert list(run.records()) == SAMPLES[:1]


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)


@given(ids=st.lists(st.text(st.characters(codec="utf-8")), unique=True, min_size=1), data=st.data())
def test_any_record_round_trips(ids: list[str], data: st.DataObject) -> None:
    records = [
        {"problem_id": name, "sample_index": index, "value": data.draw(JSON_VALUES)}
        for index, name in enumerate(ids)
    ]
    options = settings(problem_ids=ids, planned=len(ids))
    with tempfile.TemporaryDirectory() as folder:
        with RunDir.create(f"{folder}/run", options) as run:
            for record in records:
                run.append(record)
        with RunDir.resume(f"{folder}/run", options) as run:
            assert json.dumps(list(run.records())) == json.dumps(records)


def test_records_are_flushed_by_time_and_not_by_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, flushes = 1000.0, list[float]()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    many = settings(problem_ids=["q"], planned=3000)
    with RunDir.create(tmp_path / "run", many) as run:
        monkeypatch.setattr(os, "fsync", lambda fd: flushes.append(now))
        for index in range(2999):
            run.append(sample("q", index))
            now += 2**-10
        assert flushes == [1000, 1001, 1002]
        now = 1003.5
        run.append(sample("q", 2999))
        assert flushes[3:] == [1003.5]


# Processes

WRITER = """
import sys, time
from treegen.runs import RunDir, RunSettings

path, count, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
settings = RunSettings(identity={"seed": 0}, problem_ids=["a/b", "\\u2028"], planned=count)
try:
    run = RunDir.resume(path, settings)
except Exception as error:
    if "no run" not in str(error):
        raise
    run = RunDir.create(path, settings)
print("ready", flush=True)
with run:
    for n in range(count):
        key = (settings.problem_ids[n % 2], n // 2)
        if key not in run.done:
            text = f"{n} " * (n * 37 % 3000)
            run.append({"problem_id": key[0], "sample_index": key[1], "text": text})
            time.sleep(pause)
"""


def start(code: str, *args: object, **options: Any) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_killed_twenty_times_a_writer_ends_with_the_right_samples(fast: Path) -> None:
    count = 600
    undisturbed = start(WRITER, fast / "whole", count, 0)
    assert undisturbed.communicate()[1] == ""
    assert undisturbed.returncode == 0
    rng = random.Random(0)
    kills = unfinished = 0
    while kills < 20:
        writer = start(WRITER, fast / "run", count, 0.0005)
        assert writer.stdout is not None
        if rng.random() < 0.8:  # the rest die while they start
            writer.stdout.readline()
            time.sleep(rng.random() * 0.03)
        else:
            time.sleep(rng.random() * 0.1)
        writer.kill()
        error = writer.communicate()[1]
        assert error == ""
        kills += 1
        if (fast / "run" / "run.json").exists():
            with RunDir.open(fast / "run") as run:
                unfinished += run.missing > 0
    assert unfinished > 5
    last = start(WRITER, fast / "run", count, 0)
    assert last.communicate()[1] == ""
    assert last.returncode == 0
    assert stored(fast / "run") == stored(fast / "whole")
    assert len(stored(fast / "run")) == count


def test_a_second_process_is_refused_as_long_as_the_first_lives(fast: Path) -> None:
    path, count = fast / "run", 100_000
    settings = RunSettings(identity={"seed": 0}, problem_ids=["a/b", "\u2028"], planned=count)
    writer = start(WRITER, path, count, 0.001)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        with pytest.raises(RunError, match=rf"in use by process {writer.pid} on "):
            RunDir.resume(path, settings)
        with pytest.raises(RunError, match=rf"in use by process {writer.pid} on "):
            RunDir.create(path, settings)
        while (path / "samples.jsonl").stat().st_size < 10_000:
            time.sleep(0.01)
        with RunDir.open(path) as reader:
            assert len(list(reader.records())) == len(reader.done) > 0
            with pytest.raises(RunInUseError, match=rf"in use by process {writer.pid} on "):
                reader.write_results({"accuracy": None})
    finally:
        writer.kill()
        writer.communicate()
    with RunDir.resume(path, settings) as run:
        assert 0 < run.missing < count
        with pytest.raises(RunError, match=rf"in use by process {os.getpid()} on "):
            RunDir.resume(path, settings)
    RunDir.resume(path, settings).close()


def test_a_forked_child_does_not_keep_the_run_locked(fast: Path) -> None:
    code = WRITER.replace(
        'print("ready"',
        "import os\nback, out = os.pipe()\n"
        'if os.fork() == 0:\n    os.write(out, b"!")\n    time.sleep(60)\n'
        'os.read(back, 1)\nprint("ready"',
    )
    writer = start(code, fast / "run", 1000, 0.01, start_new_session=True)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
        writer.kill()
        writer.wait()
        settings = RunSettings(identity={"seed": 0}, problem_ids=["a/b", "\u2028"], planned=1000)
        RunDir.resume(fast / "run", settings).close()
    finally:
        os.killpg(writer.pid, signal.SIGKILL)
        writer.communicate()


# Failing writes


def test_a_file_size_limit_cuts_no_sample_in_two(fast: Path) -> None:
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
    limited = start(limit + WRITER, fast / "run", 600, 0)
    error = limited.communicate()[1]
    assert limited.returncode == 1
    last = error.splitlines()[-1]
    with RunDir.open(fast / "run") as run:
        kept = len(run.done)
        assert kept > 10 and run.notices == ()
    assert os.strerror(errno.EFBIG).lower() in last
    assert f"{kept} finished samples are kept" in last and f"resume={str(fast / 'run')!r}" in last
    for name in ("run", "whole"):
        writer = start(WRITER, fast / name, 600, 0)
        assert writer.communicate()[1] == ""
    assert stored(fast / "run") == stored(fast / "whole")


def test_a_full_disk_keeps_every_finished_sample(small_disk: Path) -> None:
    path, options = small_disk / "run", settings(problem_ids=["q"], planned=10_000)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(100_000))
    with RunDir.create(path, options) as run:
        run.write_results({"accuracy": 0.5})
        with pytest.raises(
            RunError, match=r"no space left on device; .* free some disk space"
        ) as full:
            for index in range(10_000):
                run.append(sample("q", index))
        kept = len(run.done)
        assert f"{kept:,} finished samples are kept" in str(full.value)
        assert (path / "samples.jsonl").read_bytes().endswith(b"}\n")
        with pytest.raises(RunError, match="no space left"):
            run.write_results({"text": "x" * 100_000})
        assert run.results() == {"accuracy": 0.5}
        # The run goes on as soon as there is room.
        filler.unlink()
        run.append(sample("q", kept))
        records = list(run.records())
    assert records == [sample("q", index) for index in range(kept + 1)]
    # Resuming on a full disk is refused, and loses nothing.
    with open(path / "samples.jsonl", "ab") as file:
        file.write(b'{"torn' * 500)
    with pytest.raises(OSError, match="No space"), open(filler, "wb", buffering=0) as file:
        while True:
            file.write(bytes(512))
    with pytest.raises(RunError, match="no space left"):
        RunDir.resume(path, options)
    filler.unlink()
    with RunDir.resume(path, options) as run:
        assert list(run.records()) == records
        assert (path / "samples.torn-1").read_bytes() == b'{"torn' * 500
    assert not list(path.glob("*.tmp"))


UNPRIVILEGED = """
import os, sys
from pathlib import Path
from treegen.errors import RunError
from treegen.runs import RunDir, RunSettings
from treegen.runs.files import check_directory

folder = Path(sys.argv[1])
settings = RunSettings(identity={}, problem_ids=["q"], planned=2)
with RunDir.create(folder / "run", settings) as run:
    run.append({"problem_id": "q", "sample_index": 0})
with RunDir.create(folder / "closed", settings) as run:
    (folder / "closed" / "samples.jsonl").chmod(0)
(folder / "sealed" / "run").mkdir(parents=True)
(folder / "run" / "run.lock").chmod(0o444)
for closed in ("run", "closed", "."):
    (folder / closed).chmod(0o555)
(folder / "sealed").chmod(0)
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
for refused in (
    lambda: RunDir.resume(folder / "run", settings),
    lambda: RunDir.create(folder / "new" / "run", settings),
    lambda: check_directory(folder / "new" / "run"),
    lambda: RunDir.open(folder / "run").write_results({}),
    lambda: RunDir.open(folder / "closed"),
    lambda: RunDir.open(folder / "sealed"),
    lambda: RunDir.open(folder / "sealed" / "run"),
):
    try:
        refused()
    except RunError as error:
        print(error)
print(list(RunDir.open(folder / "run").records()))
"""


def test_a_directory_that_cannot_be_written_is_refused(fast: Path) -> None:
    process = start(UNPRIVILEGED, fast)
    output, error = process.communicate()
    for folder in (fast, *fast.iterdir()):
        folder.chmod(0o755)
    assert error == ""
    *refusals, records = output.splitlines()
    assert [refusal.partition(":")[0] for refusal in refusals] == [
        f"cannot write in {fast / 'run'}",
        f"cannot make the directory {fast / 'new' / 'run'}",
        f"cannot write in {fast}",
        f"cannot write {fast / 'run' / 'results.json'}",
        f"cannot read or repair {fast / 'closed' / 'samples.jsonl'}",
        f"cannot read {fast / 'sealed'}",
        f"cannot read {fast / 'sealed' / 'run'}",
    ]
    assert all("permission" in refusal for refusal in refusals)
    assert records == "[{'problem_id': 'q', 'sample_index': 0}]"


# run.json and settings


def test_settings_are_stored_in_run_json(run_path: Path) -> None:
    other = {"memory": "1GiB", "device": "cuda:1"}
    for free in ({"memory": "2GiB"}, other, other, {"memory": "2GiB"}):
        finish(run_path, settings(free=free))
    with RunDir.open(run_path) as run:
        assert run.info.identity == settings().identity
        assert run.info.free == {"memory": "2GiB"}
        assert [resume["free"] for resume in run.info.resumes] == [other, {"memory": "2GiB"}]
        assert run.info.problem_ids == HOSTILE_IDS
        assert run.info.planned == 20
        assert run.info.fingerprint == settings().fingerprint
        assert {"python", "treegen", "torch", "transformers"} <= set(run.info.versions)
    assert (run_path / "run.json").read_bytes().isascii()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"temperature": 0.8}, "temperature: 0.7 -> 0.8 (temperature=)"),
        ({"seed": 1, "temperature": 1}, "temperature: 0.7 -> 1 (temperature=); seed: 0 -> 1 (-s)"),
        ({"max_tokens": 9}, "max_tokens: not set -> 9 (max_tokens=)"),
        ({"task": {"name": "gsm8k"}}, "task.version: 1 -> not set"),
        (
            {"task": {"name": "a\u2028b", "version": 1}},
            'task.name: "gsm8k" -> "a\\u2028b" (name=)',
        ),
        ({"seed": False}, "seed: 0 -> false (-s)"),
    ],
)
def test_a_changed_setting_is_refused_by_name(
    run_path: Path, changes: dict[str, Any], expected: str
) -> None:
    before = (run_path / "run.json").read_bytes()
    changed = settings(
        identity=dict(settings().identity) | changes, arguments={"seed": "-s", "task.version": ""}
    )
    with pytest.raises(RunError) as refused:
        RunDir.resume(run_path, changed)
    assert f": {expected}; resume with the old values" in str(refused.value)
    assert (run_path / "run.json").read_bytes() == before
    RunDir.resume(run_path, settings()).close()


def test_a_long_setting_is_shown_where_it_changes(fast: Path) -> None:
    def prompt(word: str) -> RunSettings:
        text = "many words " * 100 + word + " and more" * 100
        return settings(identity={"few_shot": text}, arguments={"few_shot": "--fewshot-file"})

    RunDir.create(fast / "run", prompt("eggs")).close()
    with pytest.raises(RunError) as refused:
        RunDir.resume(fast / "run", prompt("ducks"))
    message = str(refused.value)
    assert "eggs and" in message and "ducks and" in message and "(--fewshot-file)" in message
    assert len(message) < 400


def test_other_problems_are_refused(run_path: Path) -> None:
    fewer = settings(problem_ids=HOSTILE_IDS[:5], planned=10, arguments={"problem_ids": "--limit"})
    with pytest.raises(RunError, match=r"problem_ids: 10 -> 5 entries \(--limit\); planned: 20 ->"):
        RunDir.resume(run_path, fewer)
    with pytest.raises(RunError, match="problem_ids: "):
        RunDir.resume(run_path, settings(problem_ids=HOSTILE_IDS[::-1]))


def test_equal_settings_are_equal_however_they_are_written(run_path: Path) -> None:
    one = settings(identity={"a": 1, "b": (1, 2.0), "c": {"p": Path("x/y")}})
    two = settings(identity={"c": {"p": "x/y"}, "b": [1, 2], "a": 1.0})
    assert one.fingerprint == two.fingerprint != settings().fingerprint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"identity": {"sampling": {"top_p": float("nan")}}}, r"sampling\.top_p is nan"),
        ({"identity": {"x": {1: 2}}}, "x has the key 1"),
        ({"identity": {"planned": 3}}, "'planned'"),
        ({"free": {"device": object()}}, "device is a object"),
        ({"problem_ids": ["a", "b", "a"]}, "'a' occurs twice"),
        ({"problem_ids": ["\ud83d\ude00"]}, "surrogate pair"),
        ({"problem_ids": [7]}, "must be text, got 7"),
        ({"planned": 0}, "planned must be"),
    ],
)
def test_settings_that_could_not_be_compared_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        settings(**changes)


def test_a_run_is_not_started_over_another(run_path: Path, fast: Path) -> None:
    with pytest.raises(
        RunError, match=f"already contains a run; continue the run with resume={str(run_path)!r}"
    ):
        RunDir.create(run_path, settings())
    assert stored(run_path) == WANTED
    (run_path / "run.json").unlink()
    for kind in (RunDir, SearchRunDir):
        with pytest.raises(RunError, match="but no run") as lost:
            kind.create(run_path, settings())
        assert str(lost.value) == refusal(run_path)  # neither way sends the user to the other
    # Stopped before run.json was there: nothing is lost by starting again.
    (run_path / "samples.jsonl").write_bytes(b"")
    RunDir.create(run_path, settings()).close()
    (fast / "file").touch()
    for path in (fast / "file", fast / "file" / "run"):
        for refusing in (lambda path: RunDir.create(path, settings()), check_directory):
            with pytest.raises(RunError, match="cannot make the directory"):
                refusing(path)
    check_directory(fast / "new" / "run")
    check_directory(fast)
    assert not (fast / "new").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is corrupt"),
        (b"{", "is corrupt"),
        (b"\xff\xfe", "is corrupt"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[]", "is not the run.json"),
        (b"{}", "is not the run.json"),
        (
            b'{"schema": 2}',
            "schema 2, but this version of treegen supports schemas up to 1; upgrade",
        ),
        (b'{"schema": 1}', "is corrupt"),
        (b'{"schema": 1, "planned": NaN}', "NaN is not valid JSON"),
        (None, "but no run.json"),
    ],
)
def test_a_bad_run_json_is_refused(run_path: Path, content: bytes | None, message: str) -> None:
    if content is None:
        (run_path / "run.json").unlink()
    else:
        (run_path / "run.json").write_bytes(content)
    assert message in refusal(run_path)


def test_an_edited_run_json_is_refused(run_path: Path) -> None:
    text = (run_path / "run.json").read_text()
    (run_path / "run.json").write_text(text.replace('"temperature": 0.7', '"temperature": 0.8'))
    assert "was changed after it was written" in refusal(run_path)
    (run_path / "run.json").write_text(text.replace('"planned": 20', '"planned": "20"'))
    assert "expected int, got" in refusal(run_path)


def test_missing_parts_are_named(run_path: Path, fast: Path) -> None:
    (run_path / "samples.jsonl").unlink()
    assert "has no samples.jsonl" in refusal(run_path)
    assert "there is no run directory" in refusal(fast / "nothing")
    name = f"run.json is a file; pass the directory of a run, such as {run_path}"
    assert name in refusal(run_path / "run.json")
    (fast / "a.txt").touch()
    assert refusal(fast / "a.txt").endswith("a.txt is a file; pass the directory of a run")


def test_results_are_replaced_as_a_whole(run_path: Path) -> None:
    with RunDir.open(run_path) as run:
        assert run.results() is None
        run.write_results({"accuracy": 0.5, "by_k": {"1": None}})
        with pytest.raises(InputError, match=r"results\.json\.stderr is nan"):
            run.write_results({"stderr": float("nan")})
        assert run.results() == {"accuracy": 0.5, "by_k": {"1": None}}


def test_what_could_not_be_read_again_is_not_written(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RunDir.create(fast / "run", settings()) as run:
        run.append(SAMPLES[0])
        run.write_results({"done": 1})
        monkeypatch.setattr("treegen.runs.record_file.MAX_LINE_BYTES", 1000)
        with pytest.raises(RunError, match=r"has more than 1,?000 B; limit its number of tokens"):
            run.append(SAMPLES[1] | {"text": "x" * 1000})
        run.append(SAMPLES[1])
        monkeypatch.setattr("treegen.runs.files.MAX_BYTES", 1000)
        with pytest.raises(RunError, match=r"results\.json: it would have .*the old file is unch"):
            run.write_results({"skipped": ["x" * 1000]})
        assert run.results() == {"done": 1} and [*run.records()] == SAMPLES[:2]
    with pytest.raises(RunError, match=r"run\.json: it would have more than .* shorter ids$"):
        RunDir.create(fast / "new", settings(problem_ids=("x" * 1000,)))
    assert not (fast / "new").exists()


def test_results_of_a_part_never_replace_those_of_more(fast: Path) -> None:
    path = fast / "run"
    RunDir.create(path, settings()).close()
    reader = RunDir.open(path)
    with RunDir.resume(path, settings()) as run:
        with pytest.raises(RunInUseError, match=rf"in use by process {os.getpid()} on "):
            reader.write_results({"done": 0})
        run.append(SAMPLES[0])
        run.write_results({"done": 1})
    with pytest.raises(RunInUseError, match="has new samples that treegen has not read"):
        reader.write_results({"done": 0})
    with RunDir.open(path) as later:
        assert later.results() == {"done": 1}
        later.write_results({"done": 1, "accuracy": None})


def test_a_run_that_was_moved_writes_nothing_over_the_one_in_its_place(fast: Path) -> None:
    with RunDir.create(fast / "run", settings()) as moved:
        (fast / "run").rename(fast / "elsewhere")
        with pytest.raises(RunError, match="was moved or removed") as caught:
            moved.write_results({"done": 0})
        assert "pass the new directory to resume=" in str(caught.value)
        with RunDir.create(fast / "run", settings()) as run:
            run.write_results({"done": 1})
        with pytest.raises(RunError, match="was moved or removed"):
            moved.write_results({"done": 0})
    with RunDir.open(fast / "run") as run:
        assert run.results() == {"done": 1}


# Runs that never begin


@pytest.mark.parametrize("there", [False, True])
def test_a_new_run_can_be_discarded(fast: Path, there: bool) -> None:
    path = fast / "runs" / "of today" / "run"
    if there:
        path.mkdir(parents=True)
        for name in ("results.json", "empty", "notes"):
            (path / name).write_text("" if name == "empty" else "mine")
    before = sorted(fast.rglob("*"))
    with RunDir.create(path, settings()) as run:
        assert run.is_new
        if not there:
            run.write_results({"parts": []})
            (path / "verdicts-strict.jsonl").touch()
        run.discard()
    assert sorted(fast.rglob("*")) == before
    RunDir.create(path, settings()).close()  # so that the same command works afterwards


def test_a_run_with_samples_is_not_discarded(fast: Path) -> None:
    with RunDir.create(fast / "run", settings()) as run:
        run.append(SAMPLES[0])
        run.discard()
        run.append(SAMPLES[1])
    with RunDir.resume(fast / "run", settings()) as run:
        run.discard()
    with RunDir.create(fast / "empty", settings()):
        pass
    with RunDir.resume(fast / "empty", settings()) as run:  # this process did not begin it
        run.discard()
    assert len(stored(fast / "run")) == 2 and (fast / "empty" / "run.json").exists()


def test_a_forked_child_discards_nothing(fast: Path) -> None:
    with RunDir.create(fast / "run", settings()) as run:
        child = os.fork()
        if child == 0:  # as where an error of the child reaches the command's own cleaning up
            run.discard()
            os._exit(0)
        os.waitpid(child, 0)
        run.append(SAMPLES[0])
    assert len(stored(fast / "run")) == 1


def test_a_run_that_took_the_place_of_a_moved_one_is_not_discarded(fast: Path) -> None:
    with RunDir.create(fast / "run", settings()) as moved:
        (fast / "run").rename(fast / "elsewhere")
        with RunDir.create(fast / "run", settings()) as run:
            run.append(SAMPLES[0])
            moved.discard()
    assert len(stored(fast / "run")) == 1
    assert (fast / "elsewhere" / "run.json").exists()


def test_discarding_a_run_keeps_other_files(fast: Path) -> None:
    with RunDir.create(fast / "run", settings()) as run:
        (run.path / "notes").write_text("mine")
        run.discard()
    assert [file.name for file in (fast / "run").iterdir()] == ["notes"]


def test_a_run_that_fails_to_start_leaves_no_files(
    fast: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=r"no space left on device; free some disk space$"):
        RunDir.create(fast / "a" / "run", settings())
    assert not list(fast.iterdir())


def test_a_full_disk_does_not_prevent_a_lock(fast: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", refuse)
    with Lock(fast / "run.lock"), pytest.raises(RunInUseError, match="in use by another process"):
        Lock(fast / "run.lock")


def test_a_removed_lock_is_never_held_twice(fast: Path) -> None:
    """Of many that begin and discard one run at once, never two hold it."""
    path, held, most = fast / "run", [0], [0]
    guard = threading.Lock()

    def work(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(40):
            try:
                run = RunDir.create(path, settings())
            except RunError:
                continue
            with guard:
                held[0] += 1
                most[0] = max(most[0], held[0])
            time.sleep(chance.uniform(0, 0.001))
            with guard:
                held[0] -= 1
            run.discard()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 1


# Other versions


def test_other_versions_are_listed_in_one_notice(
    run_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = run_path / "samples.jsonl"
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    with RunDir.resume(run_path, settings()) as run:
        assert run.notices == ()
    now = {**versions(), "torch": "9.9.0", "python": "3.99.1", "platform": "elsewhere"}
    monkeypatch.setattr("treegen.runs.settings.versions", lambda: dict(now))
    old = versions()
    with RunDir.resume(run_path, settings()) as run:
        assert run.notices == (
            f"resumed with python 3.99.1 instead of {old['python']}, torch 9.9.0 instead of "
            f"{old['torch']}: samples may differ from those drawn before",
        )
    with RunDir.resume(run_path, settings()) as run:
        assert run.notices == ()  # compared with the last time
    monkeypatch.undo()
    for device in ("cpu", "NVIDIA H200"):
        with RunDir.resume(run_path, settings(computing={"device": device})) as run:
            notices = run.notices
    assert notices == (
        "resumed with device NVIDIA H200 instead of cpu: samples may differ from those drawn "
        "before",
    )
    file.write_bytes(whole)
    with RunDir.resume(run_path, settings()) as run:
        assert run.notices == ()  # nothing is drawn any more


# What a kill leaves over

HOLDER = """
import sys, time
from pathlib import Path
from treegen.common.files import create_locked
with create_locked(Path(sys.argv[1]) / "results.1.tmp"), create_locked(Path(sys.argv[1]) / "c-1",
folder=True):
    print("ready", flush=True)
    time.sleep(60)
"""


def test_sweeping_removes_files_of_ended_processes_only(run_path: Path, fast: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    # Of a process id that is used again, and of an earlier version.
    for name in (f"results.{os.getpid()}.tmp", "run.json.tmp", "run.1.tmp"):
        (run_path / name).write_text("{")
    (run_path / "c-2").mkdir()
    (run_path / "c-2" / "secret").write_text("x")
    (run_path / "c-3").symlink_to(fast)
    try:
        with RunDir.resume(run_path, settings()) as run:
            assert [file.name for file in run_path.glob("*.tmp")] == ["results.1.tmp"]
            run.write_results({})
        sweep(run_path, "c-*")
        assert sorted(file.name for file in run_path.glob("c-*")) == ["c-1", "c-3"]
    finally:
        process.kill()
        process.communicate()
    RunDir.resume(run_path, settings()).close()
    sweep(run_path, "c-*")
    assert not list(run_path.glob("*.tmp"))
    assert [file.name for file in run_path.glob("c-*")] == ["c-3"]
    assert stored(run_path) == WANTED


def test_a_folder_swept_before_it_is_locked_is_created_again(fast: Path) -> None:
    done = threading.Event()

    def keep_sweeping() -> None:
        while not done.is_set():
            sweep(fast, "x*")

    sweeper = threading.Thread(target=keep_sweeping)
    sweeper.start()
    try:
        for number in range(300):
            folder = number % 2 == 0
            path = fast / f"x{number % 3}"
            with create_locked(path, folder=folder):
                assert path.exists()
                shutil.rmtree(path) if folder else path.unlink()
    finally:
        done.set()
        sweeper.join()


# Signals


def test_the_first_signal_sets_the_flag_and_handlers_come_back() -> None:
    before = [signal.getsignal(s) for s in SIGNALS]
    for number in SIGNALS:
        with graceful_signals() as stopping:
            assert stopping() is None
            os.kill(os.getpid(), number)
            assert stopping() == number
        assert stopping() == number
        assert [signal.getsignal(s) for s in SIGNALS] == before


STOPPER = """
import time
from treegen.runs import graceful_signals
with graceful_signals() as stopping:
    print("ready", flush=True)
    while stopping() is None:
        time.sleep(0.01)
    print("stopping", stopping(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_the_process(first: signal.Signals, second: signal.Signals) -> None:
    process = start(STOPPER)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == f"stopping {first.value}\n"
    process.send_signal(second)
    assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == -second


TOGETHER = """
import os, signal, time
from treegen.runs import graceful_signals
with graceful_signals() as stopping:
    signal.pthread_sigmask(signal.SIG_BLOCK, {2, 15})
    os.kill(os.getpid(), 2)
    os.kill(os.getpid(), 15)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {2, 15})
    time.sleep(60)
"""
RAISING = TOGETHER.replace(
    "treegen.runs import graceful_signals", "treegen.cli.terminal import interrupts"
)
RAISING = RAISING.replace("graceful_signals() as stopping", "interrupts.raising_signals()")


@pytest.mark.parametrize("code", [TOGETHER, RAISING])
def test_two_signals_at_once_end_the_process_without_a_traceback(code: str) -> None:
    process = start(code)
    out, _ = process.communicate(timeout=30)
    assert "Signal" not in out and "race" not in out
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("first", SIGNALS)
def test_a_second_sighup_does_nothing(first: signal.Signals) -> None:
    """A terminal that is closed sends two: one by the shell, and one when the shell has ended."""
    process = start(STOPPER)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(first)
    assert process.stdout.readline() == f"stopping {first.value}\n"
    process.send_signal(signal.SIGHUP)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.kill()
    process.communicate()


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with graceful_signals() as stopping:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stopping() is None
            os.kill(os.getpid(), signal.SIGINT)
            assert stopping() == signal.SIGINT
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_nothing_is_installed() -> None:
    seen: list[StopFlag] = []

    def work() -> None:
        with graceful_signals() as stopping:
            seen.append(stopping)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen[0]() is None


def test_open_for_append_creates_locks_and_continues_a_file(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    for index in range(2):
        with open_for_append(path, "notes.lock") as file:
            assert list(file.keys) == [("a", each) for each in range(index)]
            file.append({"problem_id": "a", "sample_index": index})
            with (
                pytest.raises(RunError, match="in use by process"),
                open_for_append(path, "notes.lock"),
            ):
                pass
    with pytest.raises(RunError, match=r"cannot write in .*; check the path and its permissions"):
        open_for_append(tmp_path / "none" / "notes.jsonl", "notes.lock").__enter__()
    path.write_bytes(b"{}\n" + path.read_bytes())
    with (
        pytest.raises(RunError, match="delete this line and run the same command again"),
        open_for_append(path, "notes.lock"),
    ):
        pass
    Lock(tmp_path / "notes.lock").release()  # which the failure has given back


def test_overwriting_needs_the_lock_of_appending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "notes.jsonl"
    with open_for_append(path, "notes.lock") as file:
        file.append({"problem_id": "a", "sample_index": 0})
        with (
            pytest.raises(RunError, match="in use by process"),
            open_for_append(path, "notes.lock", overwrite=True),
        ):
            pass
        assert list(file.records())
    unlink, seen = Path.unlink, list[Path]()

    def watched(self: Path, *, missing_ok: bool = False) -> None:
        with pytest.raises(RunError, match="in use by process"):
            Lock(tmp_path / "notes.lock")
        seen.append(self)
        unlink(self, missing_ok=missing_ok)

    taken: list[Path] = []
    take = Lock._take

    def counted(where: Path) -> int:
        fd = take(where)
        taken.append(where)
        return fd

    monkeypatch.setattr(Path, "unlink", watched)
    monkeypatch.setattr(Lock, "_take", staticmethod(counted))
    with open_for_append(path, "notes.lock", overwrite=True) as file:
        assert not list(file.records())
    assert seen == [path] and len(taken) == 1


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_was_removed_is_not_called_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overwrite: bool
) -> None:
    path = tmp_path / "notes.jsonl"
    path.touch()

    def fail(path: Path, flags: int = os.O_RDONLY) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("treegen.runs.record_file.open_regular", fail)
    with (
        pytest.raises(RunError, match="cannot write") as error,
        open_for_append(path, "notes.lock", overwrite=overwrite),
    ):
        pass
    assert ("the old file is unchanged" in str(error.value)) == path.exists() != overwrite


def test_a_file_system_without_locks_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(fd: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("treegen.runs.files.fcntl.flock", no_locks)
    with pytest.raises(RunError, match="file system does not support locks; choose a directory"):
        Lock(tmp_path / "run.lock")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("text", ["a"]),
        ("num_tokens", "3"),
        ("logprob", {}),
        ("usage", {"calls": "a"}),
        ("nodes", [3]),
        ("solved", 1),
        ("votes", []),
        ("choice_logprobs", ["a"]),
    ],
)
def test_the_error_of_a_wrong_type_names_the_line(
    tmp_path: Path, field: str, value: object
) -> None:
    good = {"problem_id": "a", "sample_index": 0}
    path = tmp_path / "samples.jsonl"
    for problem_id in ("a", "\u00e9"):  # an id with escapes is decoded when the file is opened
        bad = encode_record({"problem_id": problem_id, "sample_index": 1, field: value})
        for rest in (encode_record(good), bad, b""):  # as the last line it is no torn one
            path.write_bytes(encode_record(good) + bad + rest)
            before = path.read_bytes()
            for writable in (False, True):
                with closing(RecordFile(path, writable=writable)) as file:
                    assert len(file.keys) == 2 and not file.notices
                    records = file.records()
                    assert next(records) == good
                    wrong = rf"samples.jsonl:2: corrupt line \(.*{field} must be"
                    with pytest.raises(RunError, match=wrong):
                        next(records)
            assert path.read_bytes() == before


def test_the_error_of_a_bad_duplicate_names_the_line(tmp_path: Path) -> None:
    body = b'{"problem_id":"a","sample_index":0,"text":}'
    bad = b'%b,"crc":"%08x"}\n' % (body[:-1], zlib.crc32(body))
    good = encode_record({"problem_id": "a", "sample_index": 0})
    path = tmp_path / "samples.jsonl"
    for number, data in ((1, bad + good), (2, good + bad)):
        path.write_bytes(data)
        with pytest.raises(RunError, match=rf"samples.jsonl:{number}: corrupt line \("):
            RecordFile(path, writable=False)


@pytest.mark.parametrize(
    "change",
    [
        {"model": 5},
        {"max_rows": "2"},
        {"check": "yes"},
        {"extra": []},
        {"task": ["a"]},
        {"extra": {"form": None}},
        {"stop_batch": None},
        {"confidence": {"top": "x"}},
    ],
)
def test_a_free_setting_of_a_wrong_type_is_an_error(change: dict[str, object]) -> None:
    info = {
        "schema": SCHEMA,
        "fingerprint": "",
        "created": "",
        "problem_ids": ["a"],
        "planned": 1,
        "versions": {},
        "settings": {"identity": {}, "free": {}},
    }
    resumes: list[object] = [{"time": "", "free": change, "versions": {}}]
    for corrupt in (
        info | {"resumes": resumes},
        info | {"resumes": [], "settings": {"identity": {}, "free": change}},
        info | {"resumes": [{"time": ""}]},
        info | {"resumes": [], "versions": {"torch": 3}},
    ):
        with pytest.raises(RunError, match=r"run\.json is corrupt"):
            from_json(corrupt, "run.json")
