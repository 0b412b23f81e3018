"""Worlds that are sandboxes of E2B, or of a server with E2B's HTTP interface such as AgentENV.

A snapshot has the files and the memory of a sandbox, so processes survive a fork. Needs the extra
`client`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
import time
from collections.abc import Callable, Collection
from typing import Any, Final
from urllib.parse import quote, urlencode

from treegen.errors import InputError, StoppedError
from treegen.integrations.e2b_server import MAX_PAGES, Answer, E2BServer, MissingError, check_format
from treegen.search.environments.file_tools import (
    BASH_TOOL,
    FILE_TOOLS,
    MAX_CHARS,
    PURE_TOOLS,
    Files,
    FileWorld,
    ToolError,
    check_consent,
    files_of,
    write_first_files,
)
from treegen.search.environments.protocol import Observation, Traits

_MAX_FILE: Final = 1 << 25
_LIST_DEPTH: Final = 32
_FILE_ERRORS: Final = (400, 404, 507)  # no such path, not a file, or a full disk
_ALREADY_EXISTS: Final = 409
_SIGNATURE_SEPARATOR: Final = "~"  # in the id of a snapshot, between its name and a hash of it
_METADATA_KEY: Final = "treegen"  # the key of the run's name in the metadata of sandboxes


class E2BEnvironment:
    """Sandboxes of a server with E2B's interface, in which the model runs bash and edits files.

    The server's key is read from the environment variable E2B_API_KEY, and never stored or shown.
    E2B_API_URL, E2B_SANDBOX_URL and E2B_DOMAIN name other servers than E2B's own, as in E2B's SDK.
    A sandbox that is left over, because the process was killed, expires after `timeout` seconds.

    Args:
        allow_code_execution: Must be True: commands of the model run in sandboxes of your account.
        template: Name or id of the template, or of a snapshot, that worlds start from.
        run_name: Label of the sandboxes, by which `remove_leftovers` finds them.
        files: Returns the first files of a problem.
        directory: Working directory of commands and of relative paths.
        user: The user that runs commands; None for the template's default.
        command_seconds: Maximum seconds of a command.
        timeout: Seconds without an action after which the server ends a sandbox.
        allow_internet_access: Whether sandboxes reach the internet.
        max_chars: Maximum characters of an observation's text.

    Raises:
        InputError: There is no key, or an argument cannot be used.

    Attributes:
        worlds: Worlds that are not closed, by the id of their sandbox.
        snapshots: Ids of the snapshots that this object made.
        traits: What the environment can do, and needs.
        tools: Tools that run bash, and read, write and list files.
    """

    traits: Final = Traits(pure_tools=PURE_TOOLS, needs_network=True)
    tools: Final = (BASH_TOOL, *FILE_TOOLS)

    def __init__(
        self,
        template: str = "base",
        *,
        allow_code_execution: bool = False,
        run_name: str | None = None,
        files: Callable[[Any], Files] = files_of,
        directory: str = "/home/user",
        user: str | None = None,
        command_seconds: float = 60.0,
        timeout: int = 600,
        allow_internet_access: bool = False,
        max_chars: int = MAX_CHARS,
    ) -> None:
        check_consent(allow_code_execution, "in sandboxes of your E2B account")
        if command_seconds <= 0 or timeout < 2 * command_seconds:
            raise InputError(
                "command_seconds must be more than 0, and timeout at least twice "
                f"command_seconds; got command_seconds={command_seconds:g} and timeout={timeout}"
            )
        self._server = E2BServer()
        self._creation_body: dict[str, Any] = {
            "templateID": self._read_id(template) or template,
            "timeout": timeout,
            "allow_internet_access": allow_internet_access,
            "metadata": {_METADATA_KEY: run_name or secrets.token_hex(8)},
        }
        self.directory, self.user, self.max_chars = directory.rstrip("/"), user, max_chars
        self.command_seconds, self.timeout = command_seconds, timeout
        self._files = files
        self.worlds: dict[str, E2BWorld] = {}
        self.snapshots: set[str] = set()
        self._earlier_snapshots: set[str] = set()  # snapshots of earlier processes
        self._is_closed = False

    async def start(self, problem: Any) -> E2BWorld:
        """Return a new world with the first files of a problem.

        Raises:
            WorldError: The server fails.
        """
        files = self._files(problem)  # first, because an error must leave no sandbox
        try:
            world = await self._create(self._creation_body)
        except MissingError:
            name = self._creation_body["templateID"]
            raise InputError(
                f"the template {name!r:.80} was not found; use a template that the server has"
            ) from None
        try:
            await world.make_directory()
        except BaseException:
            await world.close()
            raise
        await write_first_files(world, files)
        return world

    async def restore(self, snapshot: str) -> E2BWorld:
        """Return a new world in the state of a snapshot, its processes included.

        Raises:
            InputError: There is no such snapshot.
            WorldError: The server fails.
        """
        missing = InputError(f"there is no snapshot {snapshot!r:.80}; replay the actions")
        if (name := self._read_id(snapshot)) is None:
            raise missing
        try:
            return await self._create(self._creation_body | {"templateID": name})
        except MissingError:
            raise missing from None

    async def delete(self, snapshot: str) -> None:
        """Delete a snapshot of this object; other ids, which may name any template, do nothing.

        If the server fails, warn; `close` tries again.
        """
        if snapshot in self.snapshots | self._earlier_snapshots:
            name = self._read_id(snapshot) or ""
            path = f"/templates/{quote(name, safe='')}"
            if await self._server.delete(path, f"the snapshot {name} of E2B"):
                self.snapshots.discard(snapshot)
                self._earlier_snapshots.discard(snapshot)

    async def close(self, keep: Collection[str] = ()) -> None:
        """End all sandboxes and delete all snapshots that this object made.

        If the server fails, warn; a second call tries again.

        Args:
            keep: Ids of snapshots that stay.
        """
        self._is_closed = True
        try:
            await asyncio.gather(*(world.close() for world in [*self.worlds.values()]))
            await asyncio.gather(*map(self.delete, self.snapshots - set(keep)))
        finally:
            await self._server.close()

    async def remove_leftovers(self, keep: Collection[str] = ()) -> int:
        """End the sandboxes of earlier processes that had the same `run_name`; return how many.

        Args:
            keep: Ids of snapshots of these processes. From now on, `delete` deletes them, too, but
                no ids that another key has signed.
        """
        self._earlier_snapshots |= {
            snapshot for snapshot in keep if self._read_id(snapshot) is not None
        }
        query = urlencode({"metadata": urlencode(self._creation_body["metadata"])})
        num_deleted = 0
        seen = set(self.worlds)
        # A server without tokens of pages lists only the first sandboxes, so list what is left.
        for _ in range(MAX_PAGES):
            names = [name for name in await self._list_running(query) if name not in seen]
            if not names:
                break
            seen.update(names)
            for name in names:
                path = f"/sandboxes/{quote(name)}"
                num_deleted += await self._server.delete(path, f"the sandbox {name} of E2B")
        return num_deleted

    async def _list_running(self, query: str) -> list[str]:
        """Return the ids of running sandboxes that a query selects."""
        running = await self._server.list_all(f"/v2/sandboxes?{query}")
        with check_format():
            return [str(sandbox["sandboxID"]) for sandbox in running]

    def make_id(self, name: str) -> str:
        """Return the id of a snapshot: its name at the server, and a hash that needs the key.

        So the ids in somebody else's run directory name no templates of this account.
        """
        return f"{name}{_SIGNATURE_SEPARATOR}{self._server.sign(name)}"

    def _read_id(self, snapshot: str) -> str | None:
        """Return the name of a snapshot at the server; None if the id is not one of this key."""
        name, _, signature = snapshot.rpartition(_SIGNATURE_SEPARATOR)
        is_own = signature.isascii() and secrets.compare_digest(self._server.sign(name), signature)
        return name if is_own else None

    async def _create(self, body: dict[str, Any]) -> E2BWorld:
        if self._is_closed:
            raise StoppedError("the environment is closed; create a new environment")
        sandbox = await self._server.call("POST", "/sandboxes", body)
        with check_format():
            world = self.worlds[sandbox["sandboxID"]] = E2BWorld(self, self._server, sandbox)
        return world


class E2BWorld(FileWorld):
    """One sandbox. `E2BEnvironment` creates it.

    Attributes:
        id: Id of the sandbox.
    """

    def __init__(
        self, environment: E2BEnvironment, server: E2BServer, sandbox: dict[str, Any]
    ) -> None:
        super().__init__(environment.tools, environment.max_chars)
        self.id: str = sandbox["sandboxID"]
        self._environment, self._server = environment, server
        self._path = f"/sandboxes/{quote(self.id)}"
        self._url = server.url_of(sandbox)
        self._headers = server.headers_of(sandbox)
        if environment.user is not None:
            user = base64.b64encode(f"{environment.user}:".encode()).decode()
            self._headers["Authorization"] = f"Basic {user}"
        self._extended = time.monotonic()
        self._is_closed = False

    async def execute(self, command: str, seconds: float | None = None) -> Observation:
        """Run a command of bash, and return its output.

        Args:
            command: The command.
            seconds: Maximum seconds. Default: the environment's limit.

        Raises:
            WorldError: The server fails. Whether the command ran is not known.
        """
        await self._extend()
        seconds = seconds or self._environment.command_seconds
        process = {
            "cmd": "/bin/bash",
            "args": ["-l", "-c", command],
            "cwd": self._environment.directory,
        }
        return self.show(
            *await self._server.run_process(self._url, process, self._headers, seconds)
        )

    async def read_file(self, path: str) -> bytes:
        """Return the content of a file; the end of one of more than 32 MiB is left out.

        Raises:
            ToolError: There is no such file.
        """
        return (await self._request_file("GET", self._file_url(path), None)).body

    async def write_file(self, path: str, data: bytes) -> None:
        """Write a file, and the directories above it.

        Raises:
            ToolError: The path cannot be written.
        """
        await self._request_file("POST", self._file_url(path), data, "application/octet-stream")

    async def make_directory(self) -> None:
        """Create the working directory unless it exists. A command cannot start without it.

        Raises:
            WorldError: The server fails.
        """
        url = f"{self._url}/filesystem.Filesystem/MakeDir"
        body = json.dumps({"path": self._environment.directory}).encode()
        headers = self._headers | {"Content-Type": "application/json"}
        headers["Connect-Protocol-Version"] = "1"
        response = await self._server.send("POST", url, content=body, headers=headers)
        if response.status not in (200, _ALREADY_EXISTS):
            raise self._server.failure(response)

    async def list_files(self) -> list[str]:
        """Return the paths of all files; those of directories end with a slash."""
        body = json.dumps({"path": self._environment.directory, "depth": _LIST_DEPTH}).encode()
        url = f"{self._url}/filesystem.Filesystem/ListDir"
        answer = await self._request_file("POST", url, body, "application/json")
        above = f"{self._environment.directory}/"
        with check_format():
            return [
                entry["path"].removeprefix(above)
                + "/" * (entry.get("type") == "FILE_TYPE_DIRECTORY")
                for entry in answer.json().get("entries", ())
            ]

    async def snapshot(self) -> str:
        """Store the files and the memory of the sandbox; return the id of the snapshot.

        Raises:
            WorldError: The server fails.
        """
        answer = await self._server.call("POST", f"{self._path}/snapshots", {})
        with check_format():
            snapshot = self._environment.make_id(str(answer["snapshotID"]))
        self._environment.snapshots.add(snapshot)
        return snapshot

    async def close(self) -> None:
        """End the sandbox. Snapshots stay. If the server fails, warn; a second call tries again."""
        self._is_closed = True
        worlds = self._environment.worlds
        if self.id in worlds and await self._server.delete(
            self._path, f"the sandbox {self.id} of E2B"
        ):
            worlds.pop(self.id, None)

    async def _extend(self) -> None:
        """Let the sandbox live on if a part of its time is over."""
        if self._is_closed:
            raise StoppedError("the world is closed; restore a snapshot")
        timeout = self._environment.timeout
        if time.monotonic() - self._extended > timeout / 4:
            await self._server.call("POST", f"{self._path}/timeout", {"timeout": timeout})
            self._extended = time.monotonic()

    def _file_url(self, path: str) -> str:
        if "\0" in path or not path:
            raise ToolError(f"no file can have the name {path!r:.200}")
        full = path if path.startswith("/") else f"{self._environment.directory}/{path}"
        query = {"path": full.encode("utf-8", "surrogateescape")}
        if self._environment.user is not None:
            query["username"] = self._environment.user.encode()
        return f"{self._url}/files?{urlencode(query)}"

    async def _request_file(
        self, method: str, url: str, content: bytes | None, kind: str = "application/json"
    ) -> Answer:
        """Send a request on files to the sandbox, and return the answer.

        Args:
            method: HTTP method.
            url: The address.
            content: The body.
            kind: Media type of the body.

        Raises:
            ToolError: The request of the model cannot be met.
            WorldError: The sandbox fails.
        """
        await self._extend()
        headers = self._headers | {"Content-Type": kind, "Connect-Protocol-Version": "1"}
        answer = await self._server.send(
            method, url, content=content, headers=headers, max_bytes=_MAX_FILE
        )
        if answer.status in _FILE_ERRORS:
            raise ToolError(self._server.message_of(answer))
        if answer.status >= 300:
            raise self._server.failure(answer)
        return answer
