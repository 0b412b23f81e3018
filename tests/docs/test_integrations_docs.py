"""What docs/integrations.md shows of the server."""

import contextlib
import io
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

_BLOCKS = re.compile(r"```py\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


def test_the_client_of_the_page_gets_what_it_shows(repository: Path) -> None:
    for name in ("openai", "starlette", "uvicorn", "prometheus_client"):
        pytest.importorskip(name)
    page = (repository / "docs" / "integrations.md").read_text()
    ((program, shown),) = _BLOCKS.findall(page.partition("## An OpenAI")[2].partition("\n## ")[0])
    command = [sys.executable, "-m", "treegen", "serve", "--model", "demo", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            url = server.stderr.readline().split()[-1]
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(program.replace("http://127.0.0.1:8000/v1", url), {})
        finally:
            server.send_signal(signal.SIGTERM)
            server.stderr.read()
    lines = [line.rstrip() for line in printed.getvalue().splitlines()]
    assert lines == shown.splitlines()
