"""What the tests of the command line share: a checkpoint, data, and ways to run a command."""

import json
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from treegen.cli.main import cli
from treegen.runs import RunDir, SearchRunDir

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
SMALL = ["--limit", "4", "--n-samples", "5", "--max-tokens", "12", "--memory", "4MiB"]
OWN_TASK = """
from dataclasses import asdict, dataclass
from treegen import Node, SamplingParams
from treegen.tasks import Problem, TaskData, TaskDefaults, Verdict, summarize

@dataclass
class Note:
    text: str

class Echo:
    name = "echo"
    version = "1"
    filters = ("exact",)
    defaults = TaskDefaults(SamplingParams(max_tokens=4), num_samples=2, num_fewshot=0)

    def load(self, options):
        return TaskData((Problem("a", "say hi", "hi"),), "here")

    def tree(self, data, num_samples):
        return Node("", children=[
            Node(p.question, id=p.id, samples=num_samples) for p in data.problems])

    def score(self, problem, text):
        return {"exact": Verdict(text, text == problem.answer)}

    def aggregate(self, scores, options):
        return summarize(scores, options, task=self.name, version="1", filters=self.filters)

class Half:
    name = "half"
"""


def build_checkpoint(folder: Path, **changes: Any) -> Path:
    """Write the example's tiny checkpoint with random weights."""
    main = runpy.run_path(str(EXAMPLES / "tiny_checkpoint.py"))["main"]
    given: dict[str, Any] = {
        "layers": 2,
        "hidden": 64,
        "vocab_size": 1024,
        "context": 4096,
        "seed": 0,
    }
    main.callback(folder=folder, **given | changes)
    return folder


@dataclass(frozen=True)
class Done:
    """A finished command."""

    code: int
    out: str
    err: str
    results: dict[str, Any] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """The JSON document that --json prints, whether or not the command had the option."""
        if self.results is None:
            document: dict[str, Any] = json.loads(self.out)
            return document
        return self.results

    @property
    def error(self) -> str:
        """The one line that a refused command prints to stderr, after what it had noticed."""
        assert self.code == 2, (self.code, self.out, self.err)
        assert "Traceback" not in self.err and self.out == ""
        *before, last = self.err.splitlines()
        assert last.startswith("Error: ") and not any(x.startswith("Error") for x in before)
        return last.removeprefix("Error: ")


class Command:
    """Runs `treegen` in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, line: object = "", *args: object) -> Done:
        """Run a command as `run_command` does; return its exit code and what it printed."""
        self._capsys.readouterr()
        with recorded_documents() as documents:
            code = run_command(line, *args)
        printed = self._capsys.readouterr()
        return Done(code, printed.out, printed.err, documents[-1] if documents else None)


@contextmanager
def served(*options: str) -> Iterator[str]:
    """Run `treegen serve` in another process; yield the address of its API."""
    command = [sys.executable, "-m", "treegen", "serve", *options, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            yield next(line for line in server.stderr if "is served at" in line).split()[-1]
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()


@contextmanager
def recorded_documents(*modules: ModuleType) -> Iterator[list[dict[str, Any]]]:
    """Record the JSON documents that commands have for --json, whether or not they print them.

    modules: modules that have imported `json_line` by name already.
    """
    from treegen.cli.terminal import render

    documents: list[dict[str, Any]] = []
    print_document = render.json_line

    def record(document: Mapping[str, Any]) -> None:
        documents.append(json.loads(json.dumps(document, allow_nan=False, default=asdict)))
        print_document(document)

    with pytest.MonkeyPatch.context() as patch:
        for module in (render, *modules):
            patch.setattr(module, "json_line", record)
        yield documents


def run_command(line: object = "", *args: object) -> int:
    """Run `treegen` in this process and return its exit code.

    line: the beginning of the command as in a shell, such as "eval gsm8k -n 4".
    args: further arguments, which may contain spaces.
    """
    words = [*shlex.split(str(line)), *map(str, args)]
    try:
        cli.main(words, prog_name="treegen")
    except SystemExit as stopped:
        return int(stopped.code or 0)
    raise AssertionError("the command did not exit")


def run_light(*args: object, without: Iterable[str]) -> Done:
    """Run `treegen` in a process of its own, which must not have imported some modules."""
    code = (
        "import sys\nfrom treegen.cli.main import cli\n"
        f"try:\n    cli.main({[str(arg) for arg in args]!r})\n"
        "except SystemExit as done:\n    assert not done.code\n"
        f"heavy = {set(without)!r} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Done(done.returncode, done.stdout, done.stderr)


def results_of(path: Path) -> dict[str, Any]:
    """Return the content of a run's results.json."""
    found: dict[str, Any] = json.loads((path / "results.json").read_text(encoding="utf-8"))
    return found


def samples_of(path: Path) -> list[dict[str, Any]]:
    """Return the stored samples of a run without their times, in a fixed order."""
    with RunDir.open(path) as run:
        records = list(run.records())
    for record in records:
        del record["time"]
    return sorted(records, key=lambda r: (r["problem_id"], r["sample_index"]))


def assert_same_samples(found: Path, expected: Path) -> None:
    """Compare two runs: texts exactly, log-probabilities to 1e-4."""
    got, want = samples_of(found), samples_of(expected)
    near = [pytest.approx(record.pop("logprob"), abs=1e-4) for record in want]
    assert [record.pop("logprob") for record in got] == near
    assert got == want


def copy_part(whole: Path, part: Path, lines: int, tail: bytes = b"") -> Path:
    """Copy a run as a crash would have left it: some whole lines, and a torn one."""
    shutil.copytree(whole, part)
    samples = part / "samples.jsonl"
    kept = samples.read_bytes().split(b"\n")[:lines]
    samples.write_bytes(b"".join(line + b"\n" for line in kept) + tail)
    (part / "results.json").unlink(missing_ok=True)
    return part


def trees_of(path: Path, *dropped: str) -> list[dict[str, Any]]:
    """Return the stored trees of a run without times, in a fixed order.

    dropped: further numbers of their usage to leave out.
    """
    with SearchRunDir.open(path) as run:
        records = sorted(run.records(), key=lambda record: str(record["problem_id"]))
    for record in records:
        for name in ("seconds", *dropped):
            del record["usage"][name]
        del record["time"]
    return records


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> Path:
    """Write rows as JSON lines; a text is written as it is."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def write_data(path: Path, rows: Iterable[Mapping[str, Any] | str]) -> str:
    """Write rows as JSON lines, and return the path as `TaskOptions.data`."""
    return str(write_jsonl(path, rows))


def problem(question: str, answer: int, **more: Any) -> dict[str, Any]:
    """Return a row of GSM8K."""
    return {"question": question, "answer": f"It is {answer}.\n#### {answer}", **more}


def inspect_model(treegen: Command, *words: object) -> dict[str, Any]:
    """Return what `treegen models` says of a model."""
    done = treegen("models", *words, "-q")
    assert done.code == 0, done.err
    return done.document


def edit_config(model: Path, **changes: Any) -> None:
    """Change fields of a checkpoint's config.json."""
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | changes))
