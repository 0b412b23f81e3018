"""Faults of machines, models and a user's own tasks: one line each, and nothing left behind."""

import json
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_cases import OWN_TASK, Command, copy_part, results_of, samples_of
from report_cases import make_run

from treegen.errors import CapacityError, InputError, TreeError
from treegen.prompts.tree import Node
from treegen.runs import SearchRunDir

pytestmark = pytest.mark.usefixtures("elsewhere")

FEW = ["-n", "2", "--max-tokens", "3", "-f", "1"]


# What this machine cannot do


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--device", "mps"], "device must be auto, cpu, cuda or cuda:N, got 'mps'"),
        (["--device", "meta"], "device must be auto, cpu, cuda or cuda:N, got 'meta'"),
        (["--device", "cpu:1"], "device must be auto, cpu, cuda or cuda:N, got 'cpu:1'"),
        (["--device", "cpu", "--memory", "500TiB"], "memory 500.0 TiB exceeds the memory of cpu ("),
        (
            ["--model-args", "impl=foo"],
            "impl must be auto or one of cpu, flash, flash4, gluon, invariant",
        ),
        (["--device", "cpu", "--model-args", "impl=triton"], "impl 'triton' cannot run on cpu"),
    ],
)
@pytest.mark.parametrize("command", ["eval gsm8k", "search countdown"])
def test_what_the_machine_cannot_do_is_refused_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None, command: str, given: list[str], message: str
) -> None:
    assert message in treegen(*command.split(), "-M", tiny, "-L", 1, *given, "-o", "run").error
    assert not Path("run").exists()


def test_a_plan_may_be_for_another_machine(treegen: Command, tiny: Path) -> None:
    assert treegen("plan", "gsm8k", "-M", tiny, "-f", 1, "--memory", "500TiB").code == 0


def test_the_engine_checks_memory_and_impl_before_it_loads(tiny: Path, no_weights: None) -> None:
    from treegen.llm import LLM

    with pytest.raises(CapacityError, match="exceeds the memory of cpu"):
        LLM(str(tiny), device="cpu", memory="500TiB")


def test_loading_checks_impl_before_weights(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from treegen.model import load

    monkeypatch.setattr(load, "load_weights", lambda *args: pytest.fail("weights were loaded"))
    with pytest.raises(InputError, match="impl must be auto or one of"):
        load.load_model(tiny, impl="foo")


@contextmanager
def address_space(more: int) -> Iterator[None]:
    """Let this process have so many bytes more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_small_address_space_leaves_no_run(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    command = ["eval", "gsm8k", "-M", tiny, "-L", 1, *FEW, "-o", "runs/a/run", "--device", "cpu"]
    treegen("plan", "gsm8k", "-M", tiny, "-f", 1)  # libraries are mapped by now
    with address_space(512 << 20):
        error = treegen(*command, "--memory", "2GiB").error
    assert "a cache of 2.0 GiB exceeds the free memory of cpu; set a smaller cache" in error
    assert not list(tmp_path.iterdir())
    assert treegen(*command, "--memory", "4MiB").code == 0  # the same command, corrected


def test_of_two_tasks_a_fault_of_the_second_leaves_nothing_of_the_first(
    treegen: Command, tiny: Path, no_weights: None
) -> None:
    given = ["-M", tiny, "-L", 1, "-n", 1, "-f", 1, "--memory", "600KiB", "--max-tokens", 4]
    assert treegen("plan", "gsm8k", *given).code == 0
    error = treegen("eval", "gsm8k,needle", *given, "-o", "run").error
    assert "needle" in error or "fit" in error
    assert not Path("run").exists()


# Searches that lack memory

SEARCH = ["-L", "3", "-f", "1", "--budget", "tokens=60"]


def test_a_search_without_memory_is_refused_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None
) -> None:
    given = ["-M", tiny, *SEARCH, "--memory", "30KiB", "-o", "run"]
    assert "cache tokens, but the cache holds only" in treegen("search", "countdown", *given).error
    assert not Path("run").exists()


def test_a_search_that_lacks_memory_is_not_stored_and_done_with_more(
    treegen: Command, tiny: Path
) -> None:
    # A whole solution would fit, and what a step may take does not.
    given = ["-M", tiny, *SEARCH, "--max-tokens", 4, "--step-tokens", 200, "-m", "tot-bfs"]
    done = treegen("search", "countdown", *given, "--memory", "130KiB", "-o", "run")
    assert done.code == 1, done.err
    last = done.err.splitlines()[-1]
    assert last.startswith(
        "Error: 3 searches are missing, 3 of them because memory ran out (node 'countdown-"
    )
    assert last.endswith("use a larger --memory; continue with: treegen search --resume run")
    assert not done.document["runs"][0]["complete"] and done.document["runs"][0]["errors"] == {}
    again = treegen("search", "--resume", "run", "--memory", "4MiB")
    assert again.code == 0, again.err
    assert again.document["runs"][0]["complete"] and again.document["runs"][0]["errors"] == {}
    with SearchRunDir.open("run") as run:
        assert all(record["usage"]["tokens_decoded"] >= 60 for record in run.records())


def test_a_reward_model_that_is_none_is_found_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None
) -> None:
    given = ["-M", tiny, *SEARCH, "--evaluate", f"reward:{tiny}", "-o", "run"]
    assert (
        "a language model as verifier requires a mark"
        in treegen("search", "countdown", *given).error
    )
    assert not Path("run").exists()


# A user's own task


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("from dataclasses", "import sys; sys.exit(3)\nfrom dataclasses", "SystemExit: 3"),
        ('version = "1"', "version = 1", "its version must be text, such as '1', got 1"),
        ('("exact",)', '"exact"', "its filters must be a tuple of different names, got 'exact'"),
        ('("exact",)', "()", r"its filters must be a tuple of different names, got \(\)"),
        ("defaults = Task", "defaults = {} or 7 or Task", "its defaults must be TaskDefaults, got"),
        (
            'name = "echo"',
            "@property\n    def name(self): return 1 / 0",
            "cannot create task '.*': ZeroDivisionError",
        ),
        (
            "return TaskData(",
            "1 / 0\n        return TaskData(",
            r"load fails in task 'echo': ZeroDivisionError: division by zero \(own.py:\d+\)",
        ),
        ("return TaskData(", "return (", "load of task 'echo' must return a TaskData, got tuple"),
        (
            '"say hi", "hi"',
            '"say hi", 7',
            "load .* must set the answer of problem 'a' to text, got 7",
        ),
        ('Problem("a"', "Problem(7", "load .* must set the id of problem 7 to text, got 7"),
        (
            'return Node("", children=[',
            "raise KeyError('x')\n        return Node('', children=[",
            r"tree fails in task 'echo': KeyError: 'x' \(own.py:\d+\)",
        ),
        (
            'return Node("", children=[',
            "return (7,) or Node('', children=[",
            "the tree must be a Node, got tuple; pass the root Node",
        ),
    ],
)
def test_faults_of_a_task_are_told_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in OWN_TASK
    own = tmp_path / "own.py"
    own.write_text(OWN_TASK.replace(old, new, 1))
    command = ["eval", f"{own}:Echo", "-M", tiny, "-o", "run"]
    error = treegen(*command).error
    assert re.search(message, error), error
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'return {"exact"',
            'raise SystemExit(2)\n        return {"exact"',
            "score of problem 'a' fails in task 'echo': SystemExit: 2 (own.py:",
        ),
        (
            "Verdict(text, text == problem.answer)",
            "Verdict(None, True)",
            "score of problem 'a' fails in task 'echo': InputError: a verdict without an answer",
        ),
        (
            'return {"exact"',
            'return {"other"',
            "score of problem 'a' of task 'echo' must return a Verdict for each filter",
        ),
        (
            "    def score(",
            "    def verdicts(self, problem, record):\n        return [1]\n\n    def score(",
            "verdicts of problem 'a' of task 'echo' must return a mapping of Verdicts by filter",
        ),
        (
            "return summarize",
            "return None and summarize",
            "aggregate of task 'echo' must return a Report, got None",
        ),
        ("return summarize", "1 / 0; return summarize", "aggregate fails in task 'echo': ZeroDiv"),
    ],
)
def test_faults_in_scoring_name_the_problem_and_keep_what_was_drawn(
    treegen: Command, tiny: Path, tmp_path: Path, old: str, new: str, message: str
) -> None:
    assert old in OWN_TASK
    own = tmp_path / "own.py"
    own.write_text(OWN_TASK.replace(old, new, 1))
    command = ["eval", f"{own}:Echo", "-M", tiny, "--memory", "1MiB", "-o", "run"]
    assert message in treegen(*command).error
    assert 1 <= len(samples_of(Path("run"))) <= 2
    own.write_text(OWN_TASK)
    done = treegen("eval", "--resume", "run", "--allow-task-code")
    assert done.code == 0, done.err
    assert len(samples_of(Path("run"))) == 2


def test_changed_draws_of_a_task_are_said_to_be_the_tasks(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text(OWN_TASK)
    assert treegen("eval", f"{own}:Echo", "-M", tiny, "--memory", "1MiB", "-o", "run").code == 0
    own.write_text(OWN_TASK.replace("=4)", "=4, min_tokens=2, logit_bias={5: 1.5})"))
    error = treegen("eval", "--resume", "run", "--allow-task-code").error
    assert "sampling.min_tokens: not set -> 2 (set by the task); " in error
    assert "sampling.logit_bias.5: not set -> 1.5 (set by the task); " in error


# Files and texts


def test_wrongly_typed_parts_of_an_account_are_left_out(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    assert treegen("eval", "gsm8k", "-M", tiny, "-L", 1, *FEW, "-o", "whole").code == 0
    (good,) = results_of(Path("whole"))["parts"]
    for number, parts in enumerate(
        [
            7,
            "x",
            {"a": 1},
            [7, None, "x"],
            [{}],
            [{"seconds": "long"}],
            [{"seconds": None}],
            [{**good, "decoded_tokens": "many"}],
            [{**good, "kernels": ["cpu"]}],
            [{**good, "kernels": {"own keys": {"cpu": "x"}}}],
            [{**good, "plan": 3}],
            [{**good, "plan": {}}],
            [{**good, "impl": 3}],
            [{**good, "samples": [1]}],
            [good, {**good, "seconds": True}],
        ]
    ):
        path = copy_part(Path("whole"), tmp_path / f"run{number}", 1)
        (path / "results.json").write_text(json.dumps({"parts": parts}))
        kept = [good] if number == 14 else []
        done = treegen("score", path)
        assert done.code == 0, (parts, done.err)
        assert results_of(path)["parts"] == kept, parts
    done = treegen("eval", "--resume", path)
    assert done.code == 0 and len(results_of(path)["parts"]) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            "a\ud800b",
            r"content has the lone surrogate U\+D800 at character 1; replace the character",
        ),
        ([{"role": "user", "content": "\udfff"}], r"content\[0\]\['content'\] has the lone surr"),
    ],
)
def test_lone_surrogates_are_refused(content: object, message: str) -> None:
    with pytest.raises(TreeError, match=message):
        Node(content)  # type: ignore[arg-type]
    Node("\U0001f600 and \u2028")


def test_lone_surrogates_that_come_past_a_node_are_refused(tiny: Path) -> None:
    from treegen.model.tokenizer import load_tokenizer
    from treegen.prompts.tokens import append_text, encode_texts

    tokenizer = load_tokenizer(tiny)
    with pytest.raises(InputError, match=r"text 1 has the lone surrogate U\+DC80"):
        encode_texts(["fine", "x\udc80"], tokenizer)
    (tail,) = encode_texts(["before"], tokenizer)
    with pytest.raises(InputError, match="text has the lone surrogate"):
        append_text(tokenizer, tail, "\udc80")


# Streams

MAIN = "import sys; from treegen.cli.main import main; sys.exit(main())"


def test_a_full_disk_behind_stdout_is_told_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", MAIN, "tasks"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: cannot write to stdout: no space left on device")
    assert done.stderr.count("\n") == 1


def test_a_stream_that_accepts_only_ascii_gets_all_output(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=1, num_samples=1, draw=lambda *_: "\u00e9\n1")
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "show", run, "--tree", "p0"],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "\\xe9" in done.stdout


@pytest.mark.parametrize("how", ["gone", "full", "closed"])
def test_progress_that_nobody_reads_ends_no_run(how: str) -> None:
    code = (
        "import sys, click\n"
        "from treegen.cli.main import cli, main\n"
        "from treegen.cli.terminal.render import notice\n"
        "@cli.command('work')\n"
        "def work():\n"
        "    from treegen.evals.progress.run_progress import RunProgress\n"
        "    from treegen.cli.terminal.progress import show_progress\n"
        "    steps = (RunProgress(done=i, planned=9, rows=0, pages=0, num_pages=1, tokens=i,\n"
        "             seconds=1.0, accuracy=None, started=0) for i in range(10))\n"
        "    show_progress(steps, 'x', quiet=False)\n"
        "    notice('y')\n"
        "    click.echo('done')\n"
        "cli.list_commands = lambda ctx: ['work']\n"
        "cli.get_command = lambda ctx, name: work\n"
        "sys.argv[1:] = ['work']\n"
        "sys.exit(main())\n"
    )
    if how == "full":
        with open("/dev/full", "w") as full:
            done = subprocess.run(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, check=False
            )
        assert (done.returncode, done.stdout) == (0, b"done\n")
        return
    reader, writer = os.pipe()
    os.close(reader)
    given = f'exec 2>&-; exec {sys.executable} -c "$1"' if how == "closed" else None
    command = ["sh", "-c", given, "sh", code] if given else [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert (done.returncode, done.stdout) == (0, b"done\n")
