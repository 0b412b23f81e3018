"""`treegen serve` as a process: it starts, ends in order, and refuses what cannot be served."""

import importlib.util
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command

SERVE = [sys.executable, "-m", "treegen", "serve", "--model", "demo", "--dtype", "float32"]
BODY = {"prompt": "Tom has 3 apples and", "n": 4, "max_tokens": 150, "ignore_eos": True}


def test_sigterm_answers_what_was_asked_and_ends() -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    options = ["--port", "0", "--memory", "64MiB", "--device", "cpu"]
    with subprocess.Popen([*SERVE, *options], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        loading, loaded, served = (server.stderr.readline() for _ in range(3))
        assert loading == "loading demo\n" and loaded.startswith("loaded in ")
        assert "demo is served at http://127.0.0.1:" in served
        url = served.split()[-1]
        answers: list[Any] = []

        def ask() -> None:
            request = urllib.request.Request(
                f"{url}/completions",
                json.dumps(BODY).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(request, timeout=120) as response:
                answers.append(json.load(response))

        asking = threading.Thread(target=ask)
        asking.start()
        while "treegen_rows 0.0" in _metrics(url):
            pass
        server.send_signal(signal.SIGTERM)
        asking.join()
        rest = server.stderr.read()
        assert server.wait() == 0, rest
    assert rest == (
        "stopping: 1 request in progress, up to 60 s; press Ctrl-C again to end it\nstopped\n"
    )
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["length"] * 4
    assert answers[0]["usage"]["completion_tokens"] == 600


def test_an_idle_server_reports_its_end() -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    options = ["--port", "0", "--memory", "64MiB", "--device", "cpu"]
    with subprocess.Popen([*SERVE, *options], stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        assert any("demo is served at" in server.stderr.readline() for _ in range(3))
        server.send_signal(signal.SIGTERM)
        rest = server.stderr.read()
        assert server.wait() == 0, rest
    assert rest == "stopping: no requests in progress\nstopped\n"


@pytest.mark.parametrize("command", ["serve", "selfcheck"])
def test_a_model_without_its_option_has_a_hint(treegen: Command, command: str) -> None:
    error = treegen(command, "demo").error
    assert "extra argument (demo); did you mean '--model demo'? (see treegen" in error
    assert "did you mean" not in treegen(command, "a", "b").error


@pytest.mark.soak
def test_a_killed_server_can_be_given_its_nodes_again() -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    options = ["--port", "0", "--memory", "64MiB", "--device", "cpu"]
    operations = [
        {"op": "root", "prompt": "Tom has 3 apples and", "seed": 3},
        {"op": "sample", "node": "#0", "n": 1, "first": 2, "params": {"max_tokens": 8}},
        {"op": "sample", "node": "#1", "n": 2, "params": {"max_tokens": 8}},
    ]
    drawn: list[Any] = []
    for _ in range(2):
        with subprocess.Popen([*SERVE, *options], stderr=subprocess.PIPE, text=True) as server:
            assert server.stderr is not None
            url = next(line for line in server.stderr if "is served at" in line).split()[-1]
            request = urllib.request.Request(
                f"{url}/nodes/batch",
                json.dumps({"operations": operations}).encode(),
                {"Content-Type": "application/json"},
            )
            for node in drawn[-1:]:
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(f"{url}/nodes/{node[0]['id']}", timeout=120)
            with urllib.request.urlopen(request, timeout=120) as response:
                drawn.append(json.load(response)["results"][2]["nodes"])
            server.kill()
    assert [node["token_ids"] for node in drawn[0]] == [node["token_ids"] for node in drawn[1]]


def _metrics(url: str) -> str:
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/metrics") as response:
        return str(response.read().decode())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "--model is missing"),
        (["--model", "demo", "--host", "0.0.0.0"], "pass --api-key"),
        (
            ["--model", "demo", "--weights-dir", "/tmp"],
            "--weights-dir needs an API key; set --api-key too",
        ),
        (["--model", "demo", "--max-waiting", "0"], "--max-waiting must be at least 1"),
        (["--model", "demo", "--max-nodes", "-1"], "--max-nodes must be at least 0"),
        (["--model", "demo", "--max-key-searches", "0"], "--max-key-searches must be at least 1"),
        (["--model", "demo", "--node-lease", "0"], "--node-lease must be more than 0"),
        (["--model", "demo", "--api-keys", "/dev/null"], "pass a text file with one key per line"),
        (["--model", "demo", "--max-body", "big"], "--max-body must be a number of bytes"),
        (["--model", "demo", "--max-node-memory", "0"], "--max-node-memory must be a number"),
        (
            ["--model", "demo", "--verifier", "x", "--verifier-memory", "1XB"],
            "--verifier-memory must be a number of bytes, or a size such as '2GiB', got '1XB'",
        ),
        (["--model", "demo", "--page-size", "0"], "page-size"),
        (["--model", "demo", "--tool-format", "xml"], "--tool-format must be one of harmony"),
        (["--model", "nowhere/at/all", "--port", "0"], "nowhere/at/all"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    treegen: Command, options: list[str], message: str
) -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    done = treegen("serve", *options)
    assert done.code == 2
    assert message in done.err
    # Before it there is only that the model is being loaded.
    *before, _ = done.err.splitlines()
    assert all(line.startswith("loading ") for line in before) and len(before) <= 1


@pytest.mark.parametrize(("text", "message"), [("\n \n", "no keys"), ("a\nb\na\n", "a key twice")])
def test_a_bad_file_of_keys_is_refused(
    treegen: Command, tmp_path: Path, text: str, message: str
) -> None:
    keys = tmp_path / "keys"
    keys.write_text(text)
    done = treegen("serve", "--model", "demo", "--api-keys", keys)
    assert done.code == 2
    assert f"{keys} contains {message}" in done.err and len(done.err.splitlines()) == 1


def test_an_address_that_is_taken_is_refused_before_the_model_is_loaded(treegen: Command) -> None:
    for name in ("starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = treegen("serve", "--model", "nowhere", "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "cannot listen at 127.0.0.1" in done.err
    assert len(done.err.splitlines()) == 1


def test_without_the_extra_one_line_says_how_to_install_it(
    treegen: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "treegen.cli.serve.find_spec", lambda name: None if name == "uvicorn" else find(name)
    )
    done = treegen("serve", "--model", "demo")
    assert done.code == 2
    assert done.err == (
        "Error: `treegen serve` needs uvicorn; install it with: pip install '.[serve]' in "
        "treegen's checkout, or 'WHEEL[serve]' for its wheel\n"
    )
