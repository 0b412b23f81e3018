"""What is refused of a run directory, and the command as a process of its own."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from cli_cases import (
    Command,
    assert_same_samples,
    copy_part,
    edit_config,
    run_command,
)

from treegen.evals.pipeline.targets import new_path
from treegen.runs import RunDir

pytestmark = pytest.mark.usefixtures("elsewhere")

FEW = ["-n", "2", "--max-tokens", "3"]


# Run directories


@pytest.fixture(scope="module")
def run_path(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    assert run_command("eval", "gsm8k", "-L", 2, *FEW, "-M", tiny, "-o", path, "-q") == 0
    return path


def test_a_directory_that_holds_a_run(
    treegen: Command, tiny: Path, run_path: Path, no_weights: None
) -> None:
    error = treegen("eval", "gsm8k", "-M", tiny, "-o", run_path).error
    assert f"{run_path} already contains a run; continue the run with --resume {run_path}" in error


def test_a_directory_that_holds_runs_of_several_tasks(
    treegen: Command, tiny: Path, run_path: Path, no_weights: None
) -> None:
    folder = run_path.parent
    for command in (["eval", "gsm8k"], ["search", "countdown"]):
        error = treegen(*command, "-M", tiny, "-o", folder).error
        assert f"{folder} contains runs: {run_path}; continue these runs with --resume" in error
    assert not (folder / "run.json").exists()


def test_a_directory_that_holds_only_runs_of_the_other_command(
    treegen: Command, tiny: Path, run_path: Path, no_weights: None
) -> None:
    folder = run_path.parent
    args = ["countdown", "--compare", "sample,beam", "-M", tiny, "--resume", folder]
    error = treegen("search", *args).error
    assert f"{run_path} was created with `treegen eval`, not with `treegen search`" in error
    assert "continue this run with `treegen eval --resume`" in error
    assert [path.name for path in folder.iterdir()] == [run_path.name]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--temperature", "0.8"], "sampling.temperature: 0.7 -> 0.8 (--temperature)"),
        (["-n", "3"], "num_samples: 2 -> 3 (--n-samples)"),
        (["--stop", "x"], "(--stop)"),
        (["--limit", "1"], "(--data, --split, --limit or --sample-id)"),
        (["-f", "1"], "(--num-fewshot, --fewshot-file, --fewshot-data or --seed)"),
        (["--dtype", "bfloat16"], 'model.dtype: "float32" -> "bfloat16" (--dtype)'),
        (["--system-instruction", "x"], "(--system-instruction)"),
        (["--gen-kwargs", "ignore_eos=true"], "false -> true (--gen-kwargs ignore_eos)"),
    ],
)
def test_a_changed_setting(
    treegen: Command, run_path: Path, no_weights: None, args: list[str], message: str
) -> None:
    before = (run_path / "run.json").read_bytes()
    assert message in treegen("eval", "gsm8k", "--resume", run_path, *args).error
    assert (run_path / "run.json").read_bytes() == before


@pytest.mark.parametrize("option", [["--confidence", "window=4"], ["--log-tokens"]])
def test_what_a_finished_run_cannot_record(
    treegen: Command, run_path: Path, no_weights: None, option: list[str]
) -> None:
    before = (run_path / "run.json").read_bytes()
    error = treegen("eval", "--resume", run_path, *option).error
    assert (
        f"the run {run_path} is finished, so {option[0]} has no effect; remove {option[0]}" in error
    )
    assert "start a new run" in error
    assert (run_path / "run.json").read_bytes() == before


def test_options_that_a_finished_run_does_not_use(
    treegen: Command, run_path: Path, no_weights: None
) -> None:
    done = treegen("eval", "--resume", run_path, "--memory", "1MiB", "--device", "auto")
    assert f"{run_path} is finished and draws no samples, so it ignores --memory\n" in done.err
    again = treegen("eval", "--resume", run_path, "--memory", "1MiB")
    assert "draws no samples" not in again.err  # run.json has the value now


def test_confidence_that_only_new_samples_have(
    treegen: Command, run_path: Path, tmp_path: Path
) -> None:
    path = copy_part(run_path, tmp_path / "run", 1)
    done = treegen("eval", "--resume", path, "--confidence", "window=4")
    assert f"{path} keeps its stored samples, which were drawn without --confidence" in done.err
    error = treegen("score", path, "--votes", "tail").error
    assert "start a new run with `treegen eval --confidence`" in error


def test_a_changed_model(treegen: Command, model: Path, run_path: Path, no_weights: None) -> None:
    edit_config(model, rms_norm_eps=0.01)
    error = treegen("eval", "--resume", run_path, "--model", model).error
    assert "model.fingerprint: " in error and "(--model or --adapter)" in error


def test_what_changes_no_sample_may_change(
    treegen: Command, tiny: Path, run_path: Path, tmp_path: Path
) -> None:
    path = copy_part(run_path, tmp_path / "run", 1)
    moved = shutil.copytree(tiny, tmp_path / "moved")
    done = treegen(
        f"eval --resume {path} -M {moved} --memory 1MiB -b 1 --sharing off --eager"
        " --model-args page_size=8,run_ahead=false"
    )
    assert done.code == 0, done.err
    assert_same_samples(path, run_path)
    with RunDir.open(path) as run:
        assert run.info.resumes[-1]["free"]["model"] == str(moved)
    # The latest values stand the next time.
    copy_part(path, tmp_path / "again", 1)
    assert f"loading {moved}" in treegen("eval", "--resume", tmp_path / "again").err


def test_a_flipped_byte_in_the_middle(
    treegen: Command, run_path: Path, no_weights: None, tmp_path: Path
) -> None:
    path = shutil.copytree(run_path, tmp_path / "run")
    samples = path / "samples.jsonl"
    lines = samples.read_bytes().splitlines(keepends=True)
    samples.write_bytes(lines[0].replace(b'"seed":', b'"sead":') + b"".join(lines[1:]))
    for command in (["eval", "--resume", path], ["score", path]):
        assert "samples.jsonl:1: corrupt line" in treegen(*command).error


@pytest.mark.parametrize("command", ["eval", "score"])
def test_no_run(treegen: Command, tmp_path: Path, command: str) -> None:
    args = ["--resume"] if command == "eval" else []
    assert "has no run.json" in treegen(command, *args, tmp_path).error


@pytest.mark.parametrize("command", ["eval gsm8k", "search countdown", "demo"])
def test_a_directory_that_cannot_be_made(treegen: Command, tmp_path: Path, command: str) -> None:
    """It is refused before anything is looked for that takes long, such as a model."""
    model = [] if command == "demo" else ["-M", "nowhere/at/all"]
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name, message in (
        ("file", "is a file"),
        ("file/run", "is a file"),
        ("link", "is a symbolic link"),
    ):
        error = treegen(*command.split(), *model, "-o", tmp_path / name).error
        assert f"cannot make the directory {tmp_path / name}: " in error and message in error


def test_two_commands_at_once_have_directories_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "now")
    first = new_path("gsm8k")
    monkeypatch.setattr("os.getpid", lambda: 1)
    assert new_path("gsm8k") != first


def test_a_run_that_ends_early_says_so(
    treegen: Command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "treegen.evals.pipeline.evaluation.sample", lambda *args, **kwargs: iter(())
    )
    done = treegen("eval", "gsm8k", "-M", tiny, "-L", 1, *FEW, "-o", tmp_path / "run")
    assert done.code == 1
    assert done.err.splitlines()[-1] == (
        f"Error: 2 samples were not drawn; continue with: treegen eval --resume {tmp_path / 'run'}"
    )
    assert done.document["runs"][0]["complete"] is False


def test_a_run_that_is_stopped_or_left_keeps_all_that_had_ended(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    from treegen import LLM
    from treegen.evals.config.eval_settings import resolve_eval_settings
    from treegen.evals.identity import run_settings
    from treegen.evals.job import load_job, prepare_job
    from treegen.evals.model import load_llm, weights_fingerprint
    from treegen.evals.sampling import sample
    from treegen.runs import RunDir

    settings = {
        "task": "gsm8k",
        "model": str(tiny),
        "limit": 2,
        "num_samples": 32,
        "max_tokens": 24,
        "max_rows": 32,
        "memory": "8MiB",
    }
    job = load_job(resolve_eval_settings(settings))
    weights = weights_fingerprint(job.settings.engine)
    wanted = run_settings(job, dtype="float32", fingerprint=weights)
    llm = load_llm(job.settings.engine, weights)
    # As on a GPU, where samples that end together are stored bit by bit.
    assert isinstance(llm, LLM)
    llm.engine.run_ahead = True
    with RunDir.create(tmp_path / "run", wanted) as run:
        prepared = prepare_job(job, llm.model_info)
        steps = [now.done for now in sample(prepared, run, llm, stop=lambda: len(run.done) > 24)]
        first = job.data.problems[0].id
        assert 24 < steps[-2] < 32 <= steps[-1] == len(run.done)
        assert {index for problem, index in run.done if problem == first} == set(range(32))
    with RunDir.create(tmp_path / "left", wanted) as run:
        left = sample(prepared, run, llm)
        while next(left).done <= 24:
            pass
        assert len(run.done) < 32
        left.close()  # type: ignore[attr-defined]
        assert {index for problem, index in run.done if problem == first} == set(range(32))


# The real process


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["eval", "gsm8k", "--top-p", "0", "-M", "x"], "--top-p must be in (0, 1], got 0.0"),
        (["eval", "gsm8k", "--data", "none.jsonl", "-M", "x"], "none.jsonl does not exist"),
        (["eval", "gsm8k", "-M", "./none"], "model directory './none' does not exist"),
        (["plna"], "did you mean 'plan'?"),
    ],
)
def test_the_installed_command_prints_one_line(args: list[str], message: str) -> None:
    command = Path(sys.executable).with_name("treegen")
    start = (
        [str(command)]
        if command.exists()
        else [
            sys.executable,
            "-c",
            "import sys; from treegen.cli.main import main; sys.exit(main())",
        ]
    )
    done = subprocess.run([*start, *args], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr and done.stderr.count("\n") == 1


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    code = "import sys; from treegen.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "eval", "--help"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None and b"Traceback" not in process.stderr.read()
    process.stderr.close()
    process.wait()
