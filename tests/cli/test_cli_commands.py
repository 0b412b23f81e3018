"""Help, `treegen score`, `treegen plan`, `treegen tasks`, and how progress is drawn."""

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_cases import (
    SMALL,
    Command,
    problem,
    results_of,
    run_light,
    write_jsonl,
)
from tiny_models import save_tiny_model

from treegen.cli.terminal import progress
from treegen.evals.progress.run_progress import RunProgress
from treegen.evals.registry import list_tasks

HEAVY = ("torch", "transformers", "datasets", "numpy", "rich", "huggingface_hub")


# Help and start-up


@pytest.mark.parametrize(
    "command",
    [[], ["eval"], ["plan"], ["search"], ["score"], ["report"], ["compare"], ["show"], ["tasks"]],
)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    assert run_light(*command, "--help", without=HEAVY).out.startswith("Usage: ")


@pytest.mark.parametrize("command", ["", "plan", "eval"])
def test_help_imports_little(command: str) -> None:
    """So it answers in 0.1 s; modules are counted, since a machine may have other work."""
    code = (
        f"import sys\nsys.argv[1:] = '{command} --help'.split()\n"
        "from treegen.cli.main import main\n"
        "try:\n    main()\nexcept SystemExit:\n    print(len(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 250


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "treegen"]
    result = subprocess.run([*command, "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == "treegen 0.1.0\n"
    refused = subprocess.run([*command, "evaluate"], capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "did you mean 'eval'?" in refused.stderr


@pytest.mark.parametrize(("typed", "code"), [("--version", 0), ("evaluate", 2)])
def test_what_libraries_registered_runs_at_the_end(typed: str, code: int) -> None:
    program = f"""
import atexit, sys
class Finder:
    def find_spec(self, name, *rest):
        if name == "treegen.cli.main":
            atexit.register(print, "registered", end="")
sys.meta_path.insert(0, Finder())
sys.argv[1:] = [{typed!r}]
from treegen.__main__ import main
sys.exit(main())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code and done.stdout.endswith("registered"), done


def test_what_was_registered_before_the_command_runs_at_the_end() -> None:
    program = (
        "import atexit, sys; atexit.register(print, 'registered', end=''); "
        "sys.argv[1:] = ['--version']; from treegen.__main__ import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout.endswith("registered"), done


@pytest.mark.parametrize("module", ["treegen.cli.main", "click", "treegen.errors"])
@pytest.mark.parametrize("ignored", [False, True], ids=["", "ignored"])
def test_a_signal_while_the_command_is_imported_prints_nothing(module: str, ignored: bool) -> None:
    code = f"""
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN if {ignored} else signal.default_int_handler)
class Finder:
    def find_spec(self, name, *rest):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv[1:] = ["--version"]
runpy.run_module("treegen", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    expected = (0, "treegen 0.1.0\n") if ignored else (-signal.SIGINT, "")
    assert (done.returncode, done.stdout) == expected and not done.stderr


@pytest.mark.parametrize(
    ("typed", "completed"),
    [("sc", ["score", "score-texts"]), ("search --ro", ["--rollouts"]), ("nosuch --x", [])],
)
def test_a_shell_completes_commands_and_options(typed: str, completed: list[str]) -> None:
    place = {"COMP_WORDS": f"treegen {typed}", "COMP_CWORD": str(len(typed.split()))}
    completions = _completion("bash_complete", **place)
    assert completions.split() == [f"plain,{word}" for word in completed]


def test_the_completion_script_of_each_shell() -> None:
    for shell in ("bash", "zsh", "fish"):
        assert f"_TREEGEN_COMPLETE={shell}_complete" in _completion(f"{shell}_source")


def _completion(instruction: str, **place: str) -> str:
    command = [sys.executable, "-m", "treegen"]
    env = {**os.environ, "_TREEGEN_COMPLETE": instruction, **place}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert not done.stderr
    return done.stdout


def test_the_list_of_commands_and_the_version(treegen: Command) -> None:
    listed = treegen("--help").out
    for name in ("eval", "plan", "score", "tasks"):
        assert re.search(rf"^  {name} +\S", listed, re.MULTILINE)
    assert treegen("--version").out == "treegen 0.1.0\n"


# treegen score


def test_scoring_again_gives_the_same_without_torch(
    treegen: Command, finished: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(finished, tmp_path / "run")
    before = results_of(path)
    shown = run_light("score", path, "--json", without=("torch", "transformers", "datasets"))
    assert results_of(path) == before
    (scored,) = shown.document["runs"]
    assert scored["run"] == str(path) and scored["report"] == before["report"]
    again = treegen("score", path, "--k", "2", "--maj", "2,3", "--quiet")
    (report,) = (run["report"] for run in again.document["runs"])
    metrics = [row["metric"] for row in report["metrics"]]
    assert "pass@2" in metrics and "pass@5" not in metrics
    assert {row["k"] for row in report["majority"]} == {2, 3}
    assert "--maj 6 is not possible with 5 samples" in treegen("score", path, "--maj", "6").error


def test_sampling_and_scoring_apart(
    treegen: Command, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    path = tmp_path / "run"
    done = treegen("eval", "gsm8k", "-M", tiny, *SMALL, "-o", path, "--predict_only")
    assert done.code == 0 and "|Task " not in done.out and "accuracy" not in done.err
    assert results_of(path)["report"] is None
    assert "|Task " in treegen("score", path).out
    assert results_of(path)["report"] == results_of(finished)["report"]


def test_other_data_are_not_scored(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [problem("1+1?", 2)])
    path = tmp_path / "run"
    treegen("eval", "gsm8k", "-M", tiny, "--data", data, "-n", 1, "--max-tokens", 2, "-o", path)
    moved = write_jsonl(tmp_path / "moved.jsonl", [problem("1+1?", 2)])
    write_jsonl(data, [problem("1+1?", 3)])
    assert "are not the problems of" in treegen("score", path).error
    assert "data.problems: " in treegen("eval", "--resume", path).error
    assert treegen("score", path, "--data", moved).code == 0


# treegen plan and treegen tasks


def test_a_plan_needs_no_weights(treegen: Command, tiny: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(tiny, tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors"))
    done = treegen("plan", "gsm8k", "-M", bare, "-n", 40, "--memory", "16MiB")
    assert done.code == 0, done.err
    (plan,) = done.document["plans"]
    assert (plan["problems"], plan["samples"], plan["rows"]) == (24, 960, 960)
    assert plan["levels"][0]["segments"] == 1 and plan["levels"][0]["rows"] == 960
    assert plan["kv_bytes"]["unshared"] == plan["prompt_tokens"]["unshared"] * 512
    assert plan["kv_bytes_per_step"]["shared"] < plan["kv_bytes_per_step"]["unshared"] / 10
    assert 0 < plan["rows_that_fit"] < 960
    assert "|Level|Segments|" in done.out and "reading once pays (1)" in done.out
    off = treegen("plan", "gsm8k", "-M", bare, "--sharing", "off").document["plans"][0]
    assert off["key_tokens_per_step"]["shared"] == off["key_tokens_per_step"]["unshared"]


def test_a_plan_counts_recurrent_states(treegen: Command, tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen3_next", max_position_embeddings=8192)
    (tmp_path / "model.safetensors").unlink()
    done = treegen("plan", "gsm8k", "-M", tmp_path, "-n", 40, "--memory", "1MiB")
    (plan,) = done.document["plans"]
    assert plan["model"]["layers"] == 1 and plan["model"]["recurrent_layers"] == 3
    assert plan["model"]["state_bytes"] == 3 * 4 * (64 * 4 + 4 * 8 * 8)
    # A sixteenth of the memory is for windows of rows, and a slot is spare. A quarter of the
    # remaining memory is for states, one of which stands for none.
    state, window = plan["model"]["state_bytes"], 3 * 4 * 64 * 4
    left = 2**20 - 2**16 // window * window - state
    assert plan["num_states"] == left // 4 // state - 1
    assert 0 < plan["rows_that_fit"] < plan["num_states"]
    assert "1 layers that attend and 3 recurrent ones with 6.0 KiB of state" in done.out
    assert f"and {plan['num_states']} recurrent states, so" in done.out


@pytest.mark.parametrize("args", [(), ("list",), ("ls",)])
def test_the_tasks_are_listed(treegen: Command, args: tuple[str, ...]) -> None:
    done = treegen("tasks", *args)
    lines = done.out.splitlines()
    assert lines[0] == "Mathematics" and lines[1].startswith("  gsm8k  ")
    assert max(map(len, lines)) <= 80 and "From other packages" not in lines
    names = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(names) == sorted(info.name for info in list_tasks() if info.source == "treegen")
    num_samples = {task["name"]: task["num_samples"] for task in done.document["tasks"]}
    assert (num_samples["gsm8k"], num_samples["apps"]) == (40, 128)


def test_named_tasks_are_listed(treegen: Command, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from treegen.tasks.jsonl import QuestionAnswer\n\n"
        "class Own(QuestionAnswer):\n    name = 'own'\n"
    )
    names = [f"{own}:Own", "gsm8k"]
    found = treegen("tasks", *names).document["tasks"]
    assert [(each["name"], each["source"]) for each in found] == list(
        zip(names, ("a file", "treegen"), strict=True)
    )
    assert "metric" in found[0]["arguments"]
    shown = treegen("tasks", "gsm8k").out
    assert shown.startswith("|Task ") and "|--task-arg" in shown and "8" in shown
    assert "did you mean 'gsm8k'?" in treegen("tasks", "gsm9k").error


# Progress


def steps(planned: int) -> Iterator[RunProgress]:
    for done in range(planned + 1):
        yield RunProgress(done, planned, 8, 3, 10, done * 7, 0.5, done / planned)


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_in_a_log_is_a_line_for_each_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    progress.show_progress(steps(200), "gsm8k", quiet=False)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert lines[-1] == (
        "gsm8k: 200/200 samples (100%), 2,800 tokens/s, 8 rows, 3/10 pages, accuracy 1.000"
    )


def test_progress_in_a_log_is_printed_only_when_something_has_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def wait(times: int, done: int, tokens: int, each: float = 11.0) -> Iterator[RunProgress]:
        for _ in range(times):
            now[0] += each
            yield RunProgress(done, 200, 8, 3, 10, tokens, now[0], None)

    def run() -> Iterator[RunProgress]:
        yield from wait(20, 0, 0)  # nothing is decoded
        yield from (step for i in range(1, 12) for step in wait(1, 0, 100 * i))  # no sample ends
        yield from wait(1, 1, 1300)
        yield from wait(20, 1, 1300)

    progress.show_progress(run(), "gsm8k", quiet=False)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(" samples")[0] for line in lines] == ["gsm8k: 0/200"] * 2 + ["gsm8k: 1/200"]
    assert all("tokens/s" in line for line in lines)


def test_progress_on_a_terminal_is_one_live_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(sys, "stderr", screen := Screen())
    progress.show_progress(steps(20), "[bold]x\x1b[2J", quiet=False)
    shown = screen.getvalue()
    assert "20/20" in shown and "accuracy 1.000" in shown
    assert "[bold]x\\x1b[2J" in shown and "\x1b[2J" not in shown


def test_no_progress_when_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    progress.show_progress(steps(20), "gsm8k", quiet=True)
    assert capsys.readouterr().err == ""
