"""The bundled model that calls tools: what it solves, its size, and where it is named."""

from pathlib import Path

from cli_cases import Command, results_of
from safetensors.torch import load_file

from treegen import demo

_TOLD = "bundled demo model; use --model for your own"


def test_a_search_solves_text_worlds(treegen: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    done = treegen("search", "text-world", "--limit", 3, "--budget", "actions=40", "-o", run)
    assert done.code == 0 and _TOLD in done.err, done.err
    assert "text-world with demo-agent: 3 problems" in done.out and "Actions" in done.out
    results = results_of(run)
    assert results["settings"]["extra"] == {"level": "easy"}
    assert results["num_solved"] >= 1 and results["cost"]["actions"]["most"] <= 40


def test_a_search_repairs_files(treegen: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    args = ["search", "repair", "-T", "level=easy", "--limit", 2, "--budget", "actions=20"]
    done = treegen(*args, "--allow-code-execution", "-o", run)
    assert done.code == 0 and "\nsandbox: " in done.err, done.err
    assert results_of(run)["num_solved"] >= 1


def test_a_model_without_a_template_is_refused_at_once(treegen: Command, tmp_path: Path) -> None:
    done = treegen("search", "text-world", "-M", "demo", "-o", tmp_path / "run")
    assert done.code == 2 and len(done.err.splitlines()) <= 2
    assert "no chat template" in done.err and "--chat-template TEMPLATE" in done.err
    assert "demo-agent" in done.err and not (tmp_path / "run").exists()


def test_the_card_names_the_size_of_the_model() -> None:
    card = Path(demo.__file__).with_name("AGENT_CARD.md").read_text("utf-8")
    file = demo.model_path(demo.AGENT) / "model.safetensors"
    num = sum(tensor.numel() for tensor in load_file(file).values())
    assert f"{num:,} parameters in bfloat16, {file.stat().st_size / 1e6:.1f} MB" in card
