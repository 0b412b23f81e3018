"""The page of a run that is under way: who is answered, and that the run is left alone."""

import http.client
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from browsing import Visit
from cli_cases import Command
from report_cases import make_run

from treegen.errors import InputError
from treegen.evals.config.eval_settings import resolve_eval_settings, stored_choices
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job
from treegen.report.live_server import WatchedPage, make_server
from treegen.runs import RunDir

DONE = [2, 1, 0]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "run", num_problems=3, num_samples=2, done=DONE)


@contextmanager
def appending(run: Path) -> Iterator[Callable[[str, int], None]]:
    """Hold a run as the process that draws its samples does."""
    with RunDir.open(run) as opened:
        choices = stored_choices(opened.info)
    job = load_job(resolve_eval_settings({}, choices))
    settings = run_settings(job, dtype="float32", fingerprint="0")
    with RunDir.resume(run, settings) as held:

        def append(problem: str, index: int) -> None:
            held.append(
                {
                    "problem_id": problem,
                    "sample_index": index,
                    "seed": 0,
                    "num_tokens": 5,
                    "text": f"The answer is {problem[1:]}.",
                    "logprob": -1.0,
                    "stop": None,
                    "finish_reason": "stop",
                    "prompt_hash": "0",
                    "prompt_tokens": 700,
                    "time": "2026-01-01T00:00:00.000+00:00",
                }
            )

        yield append


@contextmanager
def served(watched: WatchedPage) -> Iterator[int]:
    """Serve a page in a thread; gives its port."""
    with make_server(watched) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(
    port: int, path: str = "/", hosts: tuple[str, ...] | None = None, method: str = "GET"
) -> tuple[int, str, http.client.HTTPMessage]:
    """Send one request. hosts: what it names as its host, if not this server."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.putrequest(method, path, skip_host=True)
    for host in (f"127.0.0.1:{port}",) if hosts is None else hosts:
        connection.putheader("Host", host)
    connection.endheaders()
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    connection.close()
    return found


@pytest.mark.usefixtures("undrawn")
def test_only_requests_for_this_server_are_answered(run: Path) -> None:
    with served(WatchedPage([run])) as port:
        for host in (f"127.0.0.1:{port}", f"localhost:{port}"):
            status, text, headers = ask(port, hosts=(host,))
            assert status == 200 and "data-live=" in text
        assert headers["X-Frame-Options"] == "DENY"
        assert headers["Cache-Control"] == "no-store"
        # A name that leads to this address is not this server's, nor is a request of two minds.
        for hosts in (
            ("evil.example",),
            (f"evil.example:{port}",),
            (f"127.0.0.1.evil.example:{port}",),
            ("127.0.0.1",),
            (f"127.0.0.1:{port + 1}",),
            (),
            ("",),
            (f"localhost:{port}", "evil.example"),
        ):
            for path in ("/", "/version"):
                status, text, _ = ask(port, path, hosts)
                assert status == 403 and "<" not in text, hosts
        for path in ("/report.html", "/../run.json", "/run.json", "/version/"):
            assert ask(port, path)[0] == 404
        assert ask(port, method="POST")[0] == 501
        status, text, headers = ask(port, method="HEAD")
        assert status == 200 and not text and int(headers["Content-Length"]) > 1000


@pytest.mark.usefixtures("undrawn")
def test_a_request_may_omit_port_80(run: Path) -> None:
    with make_server(WatchedPage([run])) as server:
        port, server.server_port = server.server_port, 80
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert ask(port, "/version", ("127.0.0.1",))[0] == 200
        thread.join()


@pytest.mark.usefixtures("undrawn")
def test_the_page_follows_the_run_and_leaves_it_alone(run: Path) -> None:
    now = [0.0]
    watched = WatchedPage([run], every=5, clock=lambda: now[0], cpu=lambda: 0.0)
    with appending(run) as append:
        before = {file.name: file.read_bytes() for file in run.iterdir()}
        first = watched.page()
        assert b"3 samples of 3 problems" in first
        assert {file.name: file.read_bytes() for file in run.iterdir()} == before
        state = watched.state()
        append("p1", 1)  # the lock is still its own, and so is the file
        assert watched.page() == first and watched.state() == state  # it was looked at just now
        now[0] += 6
        assert watched.state()["version"] != state["version"] and not watched.state()["ended"]
        assert b"4 samples of 3 problems" in watched.page()
        for index in range(2):
            append("p2", index)
        now[0] += 6
        assert b"6 samples of 3 problems" in watched.page() and watched.state()["ended"]


def test_judgements_change_the_version_of_the_page(run: Path) -> None:
    now = [0.0]
    watched = WatchedPage([run], every=5, clock=lambda: now[0])
    before = watched.state()["version"]
    folder = run / "judged" / "correctness-0"
    folder.mkdir(parents=True)
    (folder / "judgements.jsonl").write_text("")
    now[0] += 6
    assert watched.state()["version"] != before


@pytest.mark.parametrize(("cost", "apart"), [(30.0, 330), (0.2, 30)])
def test_a_page_that_takes_long_is_made_seldom(
    run: Path, monkeypatch: pytest.MonkeyPatch, cost: float, apart: float
) -> None:
    """cost: seconds of a processor. Those in which the page only waited for one do not count."""
    from treegen.report import live_server as module

    now, spent, made = [0.0], [0.0], []

    def slow(*args: object, **kwargs: object) -> str:
        made.append(now[0])
        now[0] += 30.0
        spent[0] += cost
        return "page"

    monkeypatch.setattr(module, "render_page", slow)
    watched = WatchedPage([run], every=1, clock=lambda: now[0], cpu=lambda: spent[0])
    with appending(run) as append:
        for number in range(3):
            while watched.page() and not len(made) > number:
                now[0] += 10
            append(*[("p1", 1), ("p2", 0), ("p2", 1)][number])
    assert len(made) == 3 and all(apart <= b - a < apart + 20 for a, b in pairwise(made))


@pytest.mark.usefixtures("undrawn")
def test_usage_without_finished_samples_is_shown(tmp_path: Path) -> None:
    """The account of a part is stored every few seconds, whether or not a sample has ended."""
    run = make_run(tmp_path / "run", num_problems=3, num_samples=2, done=[0, 0, 0])
    part = {"samples": 0, "prompt_tokens_computed": 700, "decoded_tokens": 40, "seconds": 9.0}
    stored = {"complete": False, "planned": 6, "done": 0, "parts": [part]}
    (run / "results.json").write_text(json.dumps(stored))
    page = WatchedPage([run]).page().decode()
    assert "Prompt tokens computed: 700; no sample has ended yet" in page
    assert "prompt sharing" not in page


@pytest.mark.usefixtures("undrawn")
def test_an_unreadable_run_is_an_error_until_it_is_readable(run: Path) -> None:
    now = [0.0]
    with served(WatchedPage([run], clock=lambda: now[0], cpu=lambda: 0.0)) as port:
        assert ask(port)[0] == 200
        whole = (run / "samples.jsonl").read_bytes()
        (run / "samples.jsonl").write_bytes(b"torn\n" + whole)
        now[0] += 60
        status, text, headers = ask(port)
        assert status == 503 and "samples.jsonl" in text
        assert headers["Content-Type"] == "text/plain; charset=utf-8"
        (run / "samples.jsonl").write_bytes(whole)
        now[0] += 60
        assert ask(port)[0] == 200


def test_a_failure_of_the_server_itself_is_printed(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: WatchedPage) -> bytes:
        raise KeyError("a defect")

    monkeypatch.setattr(WatchedPage, "page", fail)
    with served(WatchedPage([run])) as port, pytest.raises(http.client.RemoteDisconnected):
        ask(port, "/")
    assert "KeyError: 'a defect'" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(run: Path) -> None:
    with (
        served(WatchedPage([run])) as port,
        pytest.raises(InputError, match=f"cannot listen at 127.0.0.1 port {port}"),
    ):
        make_server(WatchedPage([run]), port)


def test_watching_other_paths_is_an_error(treegen: Command, tmp_path: Path) -> None:
    assert "there is no run directory" in treegen("watch", tmp_path / "gone").error
    run = make_run(tmp_path / "run", num_problems=2)
    assert "--every must be from 1" in treegen("watch", run, "--every", "0").error


def test_the_command_serves_until_it_is_stopped(run: Path) -> None:
    command = [sys.executable, "-m", "treegen", "watch", str(run), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as it:
        assert it.stdout is not None and it.stderr is not None
        try:
            url = json.loads(it.stdout.readline())["url"]
            port = int(url.rstrip("/").rpartition(":")[2])
            assert ask(port)[0] == 200
            assert ask(port, hosts=("evil.example",))[0] == 403
        finally:
            it.terminate()
        assert it.wait() == 0 and it.stderr.read().count("Traceback") == 0
    assert not os.path.exists(run / "report.html")


@pytest.mark.soak
def test_the_page_in_a_browser_goes_on(run: Path, visit: Callable[..., Visit]) -> None:
    with served(WatchedPage([run], every=1)) as port:
        opened = visit(f"http://localhost:{port}/", at="#problem=p0&sample=1")
        page = opened.page
        opened.wait(lambda: opened.row_count() == "2 of 3 samples")
        page.locator("select[name=status]").select_option("right")
        with appending(run) as append:
            append("p2", 0)
        # The page is loaded again; one stays at the sample, with the filters that one had.
        opened.wait(lambda: "4 samples of 3 problems" in page.locator("article").inner_text())
        opened.wait(lambda: page.locator(".samples h3").count() == 1)
        assert page.locator(".samples h3").inner_text() == "p0 #1"
        opened.wait(lambda: page.locator("select[name=status]").input_value() == "right")
        page.get_by_label("stay as it is").check()
        with appending(run) as append:
            append("p2", 1)
        page.wait_for_timeout(2500)
        assert "4 samples of 3 problems" in page.locator("article").inner_text()
        assert opened.complaints == []
        own = ("data:", f"http://localhost:{port}/")
        assert all(url.startswith(own) for url in opened.requests)
    opened.wait(lambda: "has ended" in page.locator(".live").inner_text())
