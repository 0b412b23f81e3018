"""The examples of searches run, offline, with a checkpoint of random weights."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import save_tiny_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return save_tiny_model(folder, max_position_embeddings=1024)


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("game24", ["Numbers left: 1 2 3 4", "(left: 24)", "tokens_decoded="]),
        ("mcts", ["SearchUsage("]),
        ("adaptive", ["pens: ", "walk: ", "cake: ", "tokens decoded"]),
        ("tool", ["tokens_decoded=", "nodes="]),
    ],
)
def test_example_runs(
    name: str,
    shown: list[str],
    checkpoint: Path,
    repository: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = repository / "examples" / f"search_{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    monkeypatch.setattr(sys, "argv", [path.name, str(checkpoint)])
    monkeypatch.setattr("rich._console", None)  # another program's settings of it may be left
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert not end.value.code
    printed = capsys.readouterr().out
    assert all(text in printed for text in shown), printed


@pytest.mark.soak
def test_methods_are_compared_at_equal_tokens(repository: Path, tmp_path: Path) -> None:
    script = repository / "examples" / "compare_methods.py"
    args = ["--budgets", "60", "--methods", "sample,ab-mcts rule=a", "--", "-L", "2"]
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "runs"), *args],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, _, plain, other = done.stdout.splitlines()
    assert plain.startswith("|sample|0.") and other.startswith("|ab-mcts rule=a|0.")
    assert " to " in other
