"""One sandbox with its helper, seen from the trusted side: sends a program and reads its output."""

from __future__ import annotations

import fcntl
import json
import os
import selectors
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import asdict, dataclass
from typing import Any

from treegen.common.lifetimes import Closeable
from treegen.errors import InputError
from treegen.tasks.sandbox import value_json
from treegen.tasks.sandbox.helper import KILL
from treegen.tasks.sandbox.isolation import SandboxTier, Workspace, helper_sources
from treegen.tasks.sandbox.programs import (
    HelperKilledError,
    Limits,
    Program,
    SandboxError,
    TestCase,
)
from treegen.tasks.sandbox.runtime import EXTERNAL_SIGNALS, Runtime, signal_name, signal_of

_MAX_STDERR_BYTES = 4096
_START_SECONDS = 60.0
_HANG_UP_SECONDS = 2.0  # for a helper to end after either side has closed the socket
_GRACE_SECONDS = 10.0  # for the helper to report after the wall time limit, which it enforces
_CHUNK = 1 << 16
_RETRY_HINT = "use `treegen score RUN` to judge the sample again"
_PIPE_CHUNKS = 4
# A program may write this many times as much to stderr as to stdout, which bounds the CPU time that
# this process spends on reading stderr.
_STDERR_FACTOR = 64
# Each wake-up costs CPU time in this process too. After _MAX_SMALL_READS wake-ups with less than
# half a pipe to read, this process pauses before each read, so that output gathers. A pipe need not
# become full in this time.
_MAX_SMALL_READS, _GATHER_SECONDS = 64, 0.005
_MAX_WAIT_SECONDS = 1e6  # the system's calls take no timeout of more than 24 days
# A right answer may be longer than the expected one, because of white space and decimals: by this
# factor, plus `Limits.output` bytes.
_EXPECTED_FACTOR = 4


@dataclass(frozen=True, slots=True)
class ProcessOutcome:
    """Everything observed of one run. `exit_info` is from the helper, the output of the program."""

    exit_info: dict[str, Any]
    """The exit `status`, `cpu` and `wall` seconds, peak resident bytes (`memory`), the limit for
    which the program was `killed` (or None), and whether it left files (`dirty`)."""
    stdout: bytes
    """The program's stdout, up to `cap` bytes and one more."""
    stderr: bytes
    """The end of its output on stderr."""
    report: bytes
    """The lines on the report descriptor."""
    cap: int
    """Maximum bytes of stdout."""
    overflow: bool
    """Whether the program wrote more than allowed."""


class SandboxProcess(Closeable):
    """A running helper, which runs one program at a time. Only one thread may use it.

    Args:
        tier: How the helper is confined.
        runtime: The interpreter and the files that programs may read.
        limits: Limits of each run.
        workspace: The directory in which programs run; None for an empty one that is removed.

    Raises:
        SandboxError: The helper does not start.
    """

    def __init__(
        self,
        tier: SandboxTier,
        runtime: Runtime,
        limits: Limits,
        workspace: Workspace | None = None,
    ) -> None:
        self.limits = limits
        self._control, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115  closed in close()
        self._scratch: str | None = None
        sources = _make_sealed_file(helper_sources().encode())
        try:
            launch = tier.launch(runtime, limits, workspace, child_end.fileno(), sources)
            if launch.setup["kind"] == "folder":
                self._scratch = launch.setup["scratch"]
            self._control.settimeout(_START_SECONDS)
            # Send the message before the helper starts. So the helper finds it, and removes its
            # directory, even if this process ends now.
            self._control.send(json.dumps(launch.setup).encode())
            # No preexec_fn: this process may hold a CUDA context and must not run after a fork.
            self._process = subprocess.Popen(
                launch.command,
                env=launch.environment,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._log,
                pass_fds=(child_end.fileno(), sources),
                start_new_session=True,
            )
        except OSError as error:
            self._log.close()
            self._control.close()
            self._drop_scratch()
            raise SandboxError(
                f"the sandbox could not be started: {error}; {_RETRY_HINT}"
            ) from error
        finally:
            child_end.close()
            os.close(sources)
        try:
            started = self._control.recv(64)
        except OSError:
            started = b""
        if not started:
            hangup = self._make_hangup_error("while it started")
            self.close()
            raise hangup

    def run(self, program: Program, test: TestCase, *, alone: bool = False) -> ProcessOutcome:
        """Run a program once.

        Args:
            program: The program.
            test: The test case.
            alone: Whether all other programs wait for this one. The helper then kills it if it
                waits for most of its time.

        Raises:
            SandboxError: The helper fails, or this process has too many open files.
            InputError: The args of the test are not plain data.
        """
        stdin = test.stdin if isinstance(test.stdin, bytes) else test.stdin.encode()
        cap = self.limits.output + _EXPECTED_FACTOR * _expected_size(program, test)
        inputs = (_encode_source(program), _encode_call(program, test), stdin)
        limits = {**asdict(self.limits), "wall_seconds": self.limits.wall, "alone": alone}
        descriptors: list[int] = []  # for the helper
        readers: list[int] = []
        try:
            try:
                for data in inputs:
                    descriptors.append(_make_sealed_file(data))
                for make_pipe in (os.pipe, os.pipe, _make_one_way_channel):
                    reader, writer = make_pipe()
                    readers.append(reader)
                    descriptors.append(writer)
                    os.set_blocking(reader, False)
            except OSError as error:
                raise SandboxError(
                    f"a program cannot be sent to the sandbox: {error}; {_RETRY_HINT}"
                ) from error
            socket.send_fds(self._control, [json.dumps(limits).encode()], descriptors)
            for descriptor in descriptors:
                os.close(descriptor)
            descriptors = []
            return self._drain(*readers, cap=cap)
        except OSError as error:
            raise self._make_hangup_error(f"while it handled a program ({error})") from error
        finally:
            for descriptor in (*descriptors, *readers):
                os.close(descriptor)

    def _drain(self, stdout: int, stderr: int, report: int, *, cap: int) -> ProcessOutcome:
        """Read all output as it comes, up to the caps, until the helper reports the end of the run.

        Reading does not wait for the end of file, because the program could delay it.

        Args:
            stdout: Descriptor of the program's stdout.
            stderr: Descriptor of its stderr.
            report: Descriptor of its report.
            cap: Maximum bytes of stdout.
        """
        caps = {stdout: cap, report: cap + 4096}
        stderr_left = _STDERR_FACTOR * self.limits.output
        received = {stdout: bytearray(), stderr: bytearray(), report: bytearray()}
        exit_info: dict[str, Any] | None = None
        killed = False
        num_small_reads = 0
        deadline = time.monotonic() + self.limits.wall + _GRACE_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            for handle in received:
                selector.register(handle, selectors.EVENT_READ)
            while exit_info is None:
                events = selector.select(min(deadline - time.monotonic(), _MAX_WAIT_SECONDS))
                if not events:
                    raise SandboxError(f"the sandbox helper does not respond; {_RETRY_HINT}")
                largest_read = 0
                for key, _ in events:
                    if key.fileobj is self._control:
                        message = self._control.recv(_CHUNK)
                        if not message:
                            raise self._make_hangup_error("while a program ran")
                        exit_info = json.loads(message)
                        continue
                    num_bytes = _read_chunk(key.fd, received[key.fd], caps.get(key.fd))
                    largest_read = max(largest_read, num_bytes)
                    if not num_bytes:
                        selector.unregister(key.fd)
                    elif key.fd == stderr:
                        stderr_left -= num_bytes
                num_small_reads += largest_read < _CHUNK // 2
                if exit_info is None and num_small_reads > _MAX_SMALL_READS:
                    time.sleep(_GATHER_SECONDS)
                if not killed and (stderr_left < 0 or _has_overflow(received, caps)):
                    self._control.send(KILL)
                    killed = True
        for handle, data in received.items():  # read what the dead process left in its pipes
            for _ in range(_PIPE_CHUNKS):
                if not _read_chunk(handle, data, caps.get(handle)):
                    break
        output, errors, report_bytes = (
            bytes(received[handle]) for handle in (stdout, stderr, report)
        )
        overflow = stderr_left < 0 or _has_overflow(received, caps)
        return ProcessOutcome(exit_info, output, errors, report_bytes, cap, overflow)

    def _read_last_log_line(self) -> str:
        self._log.seek(0)
        lines = self._log.read(_CHUNK).decode("utf-8", "replace").strip().splitlines()
        return lines[-1] if lines else ""

    def _make_hangup_error(self, when: str) -> SandboxError:
        """Return the error for a helper that does not answer, with the reason if it has ended.

        Args:
            when: What the helper was doing, for the message.
        """
        try:
            code = self._process.wait(_HANG_UP_SECONDS)
        except subprocess.TimeoutExpired:
            return SandboxError(f"the sandbox helper did not respond {when}; {_RETRY_HINT}")
        if number := signal_of(code):
            kind = HelperKilledError if number in EXTERNAL_SIGNALS else SandboxError
            return kind(
                f"the sandbox helper was ended by {signal_name(number)} {when}; {_RETRY_HINT}"
            )
        reason = self._read_last_log_line() or f"it ended {when}"
        return SandboxError(f"the sandbox helper failed: {reason}; {_RETRY_HINT}")

    def kill(self) -> None:
        """End the helper and everything in its sandbox at once; any thread may call this."""
        self._process.kill()

    def close(self) -> None:
        """End the helper and everything in its sandbox."""
        self._control.close()
        try:
            self._process.wait(_HANG_UP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
        self._drop_scratch()

    def _drop_scratch(self) -> None:
        if self._scratch is not None:  # usually the helper has removed it
            shutil.rmtree(self._scratch, ignore_errors=True)


def _encode_source(program: Program) -> bytes:
    # JSON escapes lone surrogates, which a model can write and UTF-8 cannot hold.
    return json.dumps([program.prelude, program.source, program.may_return]).encode()


def _encode_call(program: Program, test: TestCase) -> bytes:
    if program.fn_name is None:
        return b""
    try:
        return value_json.dumps([program.fn_name, list(test.args)]).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"the `args` of a test must be plain data: {error}") from None


def _expected_size(program: Program, test: TestCase) -> int:
    """Return the length of the expected answer as a program would write it; 0 if it is unknown."""
    expected = test.expected
    if program.fn_name is None:
        return len(expected) if isinstance(expected, str | bytes) else 0
    try:
        return len(value_json.dumps(expected))
    except (TypeError, ValueError, RecursionError):
        return 0


def _make_one_way_channel() -> tuple[int, int]:
    """Return the ends (reader, writer) of a channel that cannot be read at the writer's end.

    A program could reopen a pipe for reading, through /proc/self/fd, and empty it. It cannot do so
    with a socket.
    """
    reader, writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    reader.shutdown(socket.SHUT_WR)
    # Use the capacity of a pipe, whatever the system's default is.
    writer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK)
    return reader.detach(), writer.detach()


def _make_sealed_file(data: bytes) -> int:
    """Return a descriptor that reads `data` and that no process can write to, even if reopened."""
    handle = os.memfd_create("data", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        with open(handle, "wb", closefd=False) as file:
            file.write(data)
        os.lseek(handle, 0, os.SEEK_SET)
        seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
        fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
    except BaseException:  # such as an OSError if no memory is left
        os.close(handle)
        raise
    return handle


def _read_chunk(handle: int, data: bytearray, cap: int | None) -> int:
    """Read once and return the number of bytes; 0 means end of file, or nothing to read now.

    Args:
        handle: Descriptor to read.
        data: Output so far, which is extended.
        cap: Maximum bytes to keep, plus one that shows an overflow; None keeps the last bytes.
    """
    try:
        chunk = os.read(handle, _CHUNK)
    except BlockingIOError:
        return 0
    data += chunk
    if cap is None:
        del data[:-_MAX_STDERR_BYTES]
    else:
        del data[cap + 1 :]
    return len(chunk)


def _has_overflow(received: dict[int, bytearray], caps: dict[int, int]) -> bool:
    return any(len(received[handle]) > cap for handle, cap in caps.items())
