"""A server with E2B's HTTP interface, for tests: sandboxes are directories of this machine.

It follows the published descriptions: the OpenAPI document of the API, that of envd for files, and
the process and file system services of envd over the Connect protocol.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import secrets
import shutil
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import pytest

pytest.importorskip("anyio")
pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
import anyio
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "e2b_0123456789abcdef"
ENVD_PORT = "49983"
SYSTEM = ("/usr", "/bin", "/lib", "/lib64", "/etc")
"""Directories of this machine that commands with another root need."""


@dataclass
class Sandbox:
    """A directory, and what the API says of it."""

    id: str
    root: Path
    body: dict[str, Any]
    token: str = field(default_factory=lambda: f"token-{secrets.token_hex(8)}")

    @property
    def answer(self) -> dict[str, Any]:
        """A `Sandbox` of the API."""
        names = {"sandboxID": self.id, "templateID": self.body["templateID"], "clientID": "c"}
        return names | {"envdVersion": "0.4.1", "envdAccessToken": self.token, "domain": None}


class Cloud:
    """The state of a server, and its routes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.sandboxes: dict[str, Sandbox] = {}
        self.templates: dict[str, Path] = {"base": folder / "base"}
        (folder / "base" / "home" / "user").mkdir(parents=True)
        self.requests: list[tuple[str, str]] = []
        self.busy = 0  # answers of status 429 that come first
        self.break_off = False
        self.page = 100  # sandboxes that a page of a list has
        self.has_tokens = True  # whether a page names the next one
        self.failing = 0  # deletions that come first and fail
        self.endless = ""  # a path whose answers do not end
        self.status = 200  # of these answers
        self.encoding = ""  # of files
        self.drip = 0.0  # seconds between their parts
        self.form: Any = None  # what the API answers in place of objects
        self.url = ""
        api, data = self.api, self.envd
        self.app = Starlette(
            routes=[
                Route("/sandboxes", api(self.create), methods=["POST"]),
                Route("/v2/sandboxes", api(self.list)),
                Route("/sandboxes/{id}", api(self.kill), methods=["DELETE"]),
                Route("/sandboxes/{id}/snapshots", api(self.snapshot), methods=["POST"]),
                Route("/sandboxes/{id}/timeout", api(self.extend), methods=["POST"]),
                Route("/templates/{id:path}", api(self.delete_template), methods=["DELETE"]),
                Route("/files", data(self.read), methods=["GET"]),
                Route("/files", data(self.write), methods=["POST"]),
                Route("/filesystem.Filesystem/ListDir", data(self.list_dir), methods=["POST"]),
                Route("/filesystem.Filesystem/MakeDir", data(self.make_dir), methods=["POST"]),
                Route("/process.Process/Start", data(self.start), methods=["POST"]),
            ]
        )

    def api(self, handle: Any) -> Any:
        async def check(request: Request) -> Response:
            self.requests.append((request.method, request.url.path))
            if request.headers.get("x-api-key") != KEY:
                sent = request.headers.get("x-api-key")
                return _error(401, f"unauthorized: the key {sent} is not known")
            if self.busy:
                self.busy -= 1
                return _error(429, "rate limit")
            if self.failing and request.method == "DELETE":
                self.failing -= 1
                return _error(500, "internal error")
            if self.form is not None and request.method != "DELETE":
                return JSONResponse(self.form)
            if self.endless == request.url.path:
                return self.flood()
            body = await request.body()
            sandbox = None
            if "id" in request.path_params and "/sandboxes/" in request.url.path:
                sandbox = self.sandboxes.get(request.path_params["id"])
                if sandbox is None:
                    return _error(404, "sandbox not found")
            response: Response = handle(request, json.loads(body) if body else None, sandbox)
            return response

        return check

    def envd(self, handle: Any) -> Any:
        async def check(request: Request) -> Response:
            self.requests.append((request.method, request.url.path))
            assert "x-api-key" not in request.headers  # a sandbox never sees the key
            sandbox = self.sandboxes.get(request.headers["e2b-sandbox-id"])
            assert request.headers["e2b-sandbox-port"] == ENVD_PORT
            if self.endless == request.url.path:
                return self.flood()
            if sandbox is None:
                return _error(502, "the sandbox is not running")
            if request.headers.get("x-access-token") != sandbox.token:
                return _error(401, f"token {request.headers.get('x-access-token')} is wrong")
            response: Response = await handle(request, sandbox)
            return response

        return check

    def flood(self) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            while True:
                yield b"x" * (1 << 16)
                await asyncio.sleep(self.drip)

        return StreamingResponse(parts(), self.status)

    def add(self, body: dict[str, Any], source: Path) -> Sandbox:
        name = f"i{secrets.token_hex(8)}"
        sandbox = Sandbox(name, self.folder / name, body)
        shutil.copytree(source, sandbox.root, symlinks=True)
        self.sandboxes[name] = sandbox
        return sandbox

    def create(self, request: Request, body: Any, _: None) -> Response:
        if body["templateID"] not in self.templates:
            return _error(404, f"template '{body['templateID']}' not found")
        return JSONResponse(self.add(body, self.templates[body["templateID"]]).answer, 201)

    def list(self, request: Request, body: Any, _: None) -> Response:
        wanted = dict(parse_qsl(request.query_params.get("metadata", "")))
        shown = [s for s in self.sandboxes.values() if s.body["metadata"] == wanted]
        start = int(request.query_params.get("nextToken", "").removeprefix("at=&") or 0)
        stop = start + self.page
        more = {"X-Next-Token": f"at=&{stop}"} if self.has_tokens and stop < len(shown) else None
        page = [sandbox.answer | {"state": "running"} for sandbox in shown[start:stop]]
        return JSONResponse(page, headers=more)

    def kill(self, request: Request, body: Any, sandbox: Sandbox) -> Response:
        shutil.rmtree(self.sandboxes.pop(sandbox.id).root)
        return Response(status_code=204)

    def snapshot(self, request: Request, body: Any, sandbox: Sandbox) -> Response:
        assert body == {}
        name = f"team/{secrets.token_hex(4)}:default"
        self.templates[name] = self.folder / secrets.token_hex(8)
        shutil.copytree(sandbox.root, self.templates[name], symlinks=True)
        return JSONResponse({"snapshotID": name, "names": [name]}, 201)

    def extend(self, request: Request, body: Any, sandbox: Sandbox) -> Response:
        assert body["timeout"] > 0
        return Response(status_code=204)

    def delete_template(self, request: Request, body: Any, _: None) -> Response:
        folder = self.templates.pop(request.path_params["id"], None)
        if folder is None:
            return _error(404, "template not found")
        shutil.rmtree(folder)
        return Response(status_code=204)

    async def read(self, request: Request, sandbox: Sandbox) -> Response:
        path = _inside(sandbox, request.query_params["path"])
        if not path.exists():
            return _error(404, f"path '{request.query_params['path']}' does not exist")
        if path.is_dir():
            return _error(400, f"path '{request.query_params['path']}' is a directory")
        headers = {"Content-Encoding": self.encoding} if self.encoding else None
        return Response(path.read_bytes(), 200, headers, "application/octet-stream")

    async def write(self, request: Request, sandbox: Sandbox) -> Response:
        assert request.headers["content-type"] == "application/octet-stream"
        path = _inside(sandbox, request.query_params["path"])
        if path.is_dir():
            return _error(400, f"path '{request.query_params['path']}' is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(await request.body())
        return JSONResponse([{"path": str(path), "name": path.name, "type": "file"}])

    async def list_dir(self, request: Request, sandbox: Sandbox) -> Response:
        assert request.headers["connect-protocol-version"] == "1"
        body = await request.json()
        assert body["depth"] > 1
        entries = []
        for path in _inside(sandbox, body["path"]).rglob("*"):
            kind = "FILE_TYPE_DIRECTORY" if path.is_dir() else "FILE_TYPE_FILE"
            shown = f"/{path.relative_to(sandbox.root)}"
            entries.append({"name": path.name, "type": kind, "path": shown})
        return JSONResponse({"entries": entries} if entries else {})

    async def make_dir(self, request: Request, sandbox: Sandbox) -> Response:
        path = _inside(sandbox, (await request.json())["path"])
        if path.exists():
            return _error(409, "directory already exists")
        path.mkdir(parents=True)
        return JSONResponse({"entry": {"name": path.name, "type": "FILE_TYPE_DIRECTORY"}})

    async def start(self, request: Request, sandbox: Sandbox) -> Response:
        assert request.headers["content-type"] == "application/connect+json"
        assert request.headers["connect-protocol-version"] == "1"
        data = await request.body()
        assert data[0] == 0 and int.from_bytes(data[1:5], "big") == len(data) - 5
        process = json.loads(data[5:])["process"]
        seconds = int(request.headers["connect-timeout-ms"]) / 1000
        return StreamingResponse(
            self._run(process, sandbox, seconds), media_type="application/connect+json"
        )

    async def _run(
        self, process: dict[str, Any], sandbox: Sandbox, seconds: float
    ) -> AsyncIterator[bytes]:
        command, cwd = [process["cmd"], *process["args"]], _inside(sandbox, process["cwd"])
        if not process["cwd"].startswith("/home/user"):
            command = [*_as_root(sandbox), "--chdir", process["cwd"], *command]
        child = await asyncio.create_subprocess_exec(
            *command,
            cwd=cwd,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={"PATH": os.environ["PATH"], "HOME": str(sandbox.root / "home" / "user")},
        )
        yield _event({"start": {"pid": child.pid}})
        yield _event({"keepalive": {}})
        if self.break_off:
            os.killpg(child.pid, signal.SIGKILL)
            await child.communicate()
            return
        assert child.stdout is not None and child.stderr is not None
        try:
            async with asyncio.timeout(seconds):
                for name, stream in (("stdout", child.stdout), ("stderr", child.stderr)):
                    while data := await stream.read(50_000):
                        yield _event({"data": {name: base64.b64encode(data).decode()}})
                await child.wait()
        except TimeoutError:
            yield _envelope({"error": {"code": "deadline_exceeded"}}, 2)
            return
        finally:  # also if the client has gone
            if child.returncode is None:
                os.killpg(child.pid, signal.SIGKILL)
            with anyio.CancelScope(shield=True):  # a client that has gone cancels each await
                await child.communicate()  # to its pipes' ends, which closes them
        status = child.returncode or 0
        end: dict[str, Any] = {"status": f"exit status {status}", "exited": True}
        if status < 0:
            end = {"exitCode": -1, "status": "signal: killed", "error": "signal: killed"}
        elif status:
            end["exitCode"] = status
        yield _event({"end": end})
        yield _envelope({}, 2)


def _as_root(sandbox: Sandbox) -> list[str]:
    """Return the start of a command for which the sandbox's directory is the root."""
    system = [word for name in SYSTEM for word in ("--ro-bind-try", name, name)]
    return ["bwrap", "--bind", str(sandbox.root), "/", *system, "--dev", "/dev", "--proc", "/proc"]


def _inside(sandbox: Sandbox, path: str) -> Path:
    assert path.startswith(("/home/user", "/app", "/tests/", "/logs/"))
    return sandbox.root / path[1:]


def _error(status: int, message: str) -> Response:
    return JSONResponse({"code": status, "message": message}, status)


def _event(event: dict[str, Any]) -> bytes:
    return _envelope({"event": event}, 0)


def _envelope(message: dict[str, Any], flags: int) -> bytes:
    data = json.dumps(message).encode()
    return bytes([flags]) + len(data).to_bytes(4, "big") + data


@contextmanager
def serving(folder: Path) -> Iterator[Cloud]:
    """Run a server on a free port of this machine."""
    cloud = Cloud(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        cloud.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(cloud.app, log_level="error", lifespan="off")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield cloud
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """A server for environments that the command line opens, whose commands have a root."""
    if shutil.which("bwrap") is None:
        pytest.skip("the server of the tests starts commands by bubblewrap")
    (tmp_path / "cloud").mkdir()
    with serving(tmp_path / "cloud") as cloud:
        for name, value in (("API_KEY", KEY), ("API_URL", cloud.url), ("SANDBOX_URL", cloud.url)):
            monkeypatch.setenv(f"E2B_{name}", value)
        yield cloud
