"""A server in a thread of the tests' process."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from treegen import LLM, AsyncLLM

pytest.importorskip("uvicorn")
pytest.importorskip("httpx2")
pytest.importorskip("prometheus_client")
pytest.importorskip("starlette")
import httpx2
import uvicorn

from treegen.integrations.server.app import Server
from treegen.integrations.server.run import _GracefulServer, config_of
from treegen.integrations.server.sockets import bind_socket

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | length }} tools\n{% endif %}assistant:"
    "{% if enable_thinking is defined %}<think>"
    "{{ '' if enable_thinking else '</think>' }}{% endif %}"
)
KEY = "open sesame"
HTTP = httpx2.Client(verify=False, limits=httpx2.Limits(max_keepalive_connections=0))
"""Sends each request in a connection of its own. Reading TLS certificates would take 50 ms each."""


@dataclass
class Running:
    """A server in a thread of this process."""

    served: AsyncLLM
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(self, path: str, body: Any, **more: Any) -> httpx2.Response:
        headers = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
        return HTTP.post(
            f"{self.url}/v1/{path}",
            headers=headers,
            timeout=120,
            **more,
            **({"content": body} if isinstance(body, bytes) else {"json": body}),
        )

    def wait_until_idle(self) -> None:
        while self.served.status().rows or self.served.num_waiting:
            time.sleep(0.01)
        self.served.check()


@contextmanager
def listening(
    model: LLM,
    *,
    body_seconds: float = 60,
    key: str | Sequence[str] | None = KEY,
    max_waiting: int = 100,
    **more: Any,
) -> Iterator[Running]:
    has_nodes = more.get("nodes") is not None or more.get("searches") is not None
    with AsyncLLM(model, max_waiting=max_waiting, nodes=has_nodes) as served:
        handlers = Server(
            served, name="demo", api_key=key, max_body=2**16, body_seconds=body_seconds, **more
        )
        config = config_of(handlers.app())
        config.port = 0
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        running = Running(served, server.servers[0].sockets[0].getsockname()[1])
        try:
            yield running
            running.wait_until_idle()
        except BaseException:
            server.force_exit = True  # so that a failed test does not keep the process from ending
            raise
        finally:
            server.should_exit = True
            thread.join()
            handlers.close()
    assert model.cache.pool.num_used == 0


@contextmanager
def draining(served: AsyncLLM, **options: Any) -> Iterator[Running]:
    """A server that is told to end, and then ends at once what is under way."""
    urls: list[str] = []
    app = Server(served, name="demo", **options).app()
    server = _GracefulServer(config_of(app), served, 0, urls.append)
    at = bind_socket("127.0.0.1", 0)
    at.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([at])))
    thread.start()
    while not urls:
        time.sleep(0.01)
    try:
        yield Running(served, int(urls[0].rpartition(":")[2]))
    finally:
        server.handle_exit(signal.SIGTERM, None)
        thread.join()
