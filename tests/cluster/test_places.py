"""What is said of workers is checked before anything is loaded or started."""

import socket
from importlib.util import find_spec
from pathlib import Path

import pytest
from cli_cases import Command

from treegen.errors import InputError
from treegen.llm.cluster import placement
from treegen.llm.cluster.placement import Placement, parse_placement

HAS_RAY = find_spec("ray") is not None
needs_ray = pytest.mark.skipif(not HAS_RAY, reason="needs ray")


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "num_gpus", lambda: 4)


@needs_ray
@pytest.mark.usefixtures("four_gpus")
def test_gpus_are_all_some_or_named_ones() -> None:
    assert parse_placement("all") == Placement("cuda", 4, (0, 1, 2, 3))
    assert parse_placement() == parse_placement("all")
    assert parse_placement(2) == parse_placement("2") == Placement("cuda", 2, (0, 1))
    assert parse_placement("0,2") == Placement("cuda", 2, (0, 2))
    assert parse_placement("3,") == Placement("cuda", 1, (3,))
    assert parse_placement("all", address="10.0.0.1:6379") == Placement(
        "cuda", None, (), "10.0.0.1:6379"
    )
    assert parse_placement(workers=3, address="auto") == Placement("cpu", 3, (), "auto")


WRONG = [
    (["--gpus", "5"], "5 GPUs were requested (--gpus), but this machine has 4"),
    (["--gpus", "0,4"], "GPU 4 was requested (--gpus), but this machine has 4"),
    (["--gpus", "0"], "must be at least 1"),
    (["--gpus", "1,1"], "contains the same GPU twice"),
    (["--gpus", "some"], "must be all, a number or a list"),
    (["--gpus", "2", "--workers", "2"], "cannot be used together"),
    (["--gpus", "2", "--device", "cpu"], "cannot be used together with device"),
    (["--gpus", "2", "--device", "cuda:1"], "cannot be used together with device"),
    (["--gpus", "2", "--model-args", "device=cpu"], "cannot be used together with device"),
    (["--gpus", "0,1", "--ray", "auto"], "not supported with a Ray cluster"),
    (["--workers", "0"], "workers must be at least 1"),
    (["--workers", "1000000"], "cores, got 1,000,000"),
    (["--workers", "2", "--device", "cuda"], "run only on CPUs"),
    (["--workers", "2", "--ray", "nowhere"], "auto or HOST:PORT"),
    (["--workers", "2", "--ray", "ray://a:1"], "auto or HOST:PORT"),
]


@needs_ray
@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("flags", "message"), WRONG, ids=[" ".join(flags) for flags, _ in WRONG])
def test_what_cannot_be_is_refused_in_one_line(
    treegen: Command, flags: list[str], message: str, tmp_path: Path
) -> None:
    for verb in (["eval", "gsm8k"], ["search", "game24"]):
        error = treegen(*verb, "-M", tmp_path / "none", "-o", tmp_path / "run", *flags).error
        assert message in error
    assert not (tmp_path / "run").exists()


@needs_ray
def test_a_machine_without_a_gpu_says_so(
    treegen: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placement, "num_gpus", lambda: 0)
    error = treegen("eval", "gsm8k", "-M", tmp_path, "--gpus", "all").error
    assert "torch sees no GPU" in error and "--workers" in error


def test_without_ray_it_says_how_to_install_it(
    treegen: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(placement, "find_spec", lambda name: None)
    error = treegen("eval", "gsm8k", "-M", tmp_path, "--workers", "2").error
    assert "pip install '.[ray]'" in error


@needs_ray
def test_an_address_that_does_not_answer_is_told_soon(
    treegen: Command, monkeypatch: pytest.MonkeyPatch, tiny: Path, tmp_path: Path
) -> None:
    """Nobody listens there, or somebody who is no Ray."""
    from treegen.llm.cluster import ray_session

    monkeypatch.setattr(ray_session, "_ANSWER_SECONDS", 0.5)
    args = ["eval", "gsm8k", "-M", tiny, "-o", tmp_path / "run", "-L", "1", "--workers", "2"]
    with socket.create_server(("127.0.0.1", 0)) as server:
        silent = f"127.0.0.1:{server.getsockname()[1]}"
        assert "no Ray cluster responds" in treegen(*args, "--ray", silent).error
    assert "no Ray cluster responds" in treegen(*args, "--ray", silent).error
    assert not (tmp_path / "run").exists()


def test_a_bad_address_is_an_input_error() -> None:
    with pytest.raises(InputError, match="HOST:PORT"):
        placement._check_address("host:99999")
