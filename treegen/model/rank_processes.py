"""Rank 0 of a tensor-parallel model: start the other ranks, send them work, and end them.

Each follower is a process on this machine that starts at `treegen.llm.follower.main`. Over a pipe,
rank 0 tells it to load the model, make a cache, and run each pass. A follower decides nothing, so
scheduling, sampling and search run in this process alone.
"""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, Final

import torch

from treegen.common.files import create_locked, sweep
from treegen.common.lifetimes import Closeable
from treegen.errors import InputError, TreegenError, WorkerError, arg
from treegen.model.config import load_spec, resolve_device
from treegen.model.linear.fp8 import check_device as check_fp8
from treegen.model.load import load_model
from treegen.model.memory import check_cache_bytes
from treegen.model.model import Model
from treegen.model.options import LOADING, EngineOptions
from treegen.model.parallel.ranks import abort, check_free, join, leave
from treegen.model.reproducible import check_reproducible
from treegen.model.tokenizer import load_image_processor, load_tokenizer, read_chat_template
from treegen.ops.attention.registry import check_reads_fp8, choose

# exit_with_parent comes first, because importing torch may take a minute on a busy machine.
_START_CODE: Final = (
    "import sys; from treegen.common.signals import exit_with_parent; "
    "exit_with_parent(int(sys.argv[-1])); "
    "from treegen.common.lifetimes import raise_gc_threshold; raise_gc_threshold(); "
    "from treegen.llm.follower import main; main()"
)
_START_SECONDS: Final = 300.0  # for a follower to import its modules
_REPORT_SECONDS: Final = 2.0  # seconds within which a failing follower has reported its error
_FOLDER: Final = "treegen-ranks-"
_EXIT_SECONDS: Final = 10.0  # seconds for a follower to end on its own


class FollowerProcesses:
    """The processes of ranks 1 and up.

    Attributes:
        failed: The reason why the ranks have ended; empty while they work.
        folder: A folder that all ranks share.
    """

    def __init__(self, size: int, device_type: str) -> None:
        """Start ranks 1 to size - 1, and wait until each is about to join.

        Raises:
            WorkerError: a rank cannot be started.
        """
        temporary = Path(tempfile.gettempdir())
        sweep(temporary, f"{_FOLDER}*")  # remove folders of killed processes
        self.folder = Path(tempfile.mkdtemp(prefix=_FOLDER, dir=temporary))
        self._folder_lock = ExitStack()
        self._folder_lock.enter_context(create_locked(self.folder, folder=True))
        self.failed = ""
        self._closing = False
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._watcher = threading.Thread(
            target=self._watch_connections, name="treegen-ranks", daemon=True
        )
        path = [entry for entry in sys.path if entry]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        try:
            for rank in range(1, size):
                local_end, remote_end = Pipe()
                arguments = [remote_end.fileno(), rank, size, device_type, self.folder, os.getpid()]
                process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _START_CODE, *map(str, arguments)],
                    env=environment,
                    pass_fds=[remote_end.fileno()],
                    stdin=subprocess.DEVNULL,
                    process_group=0,  # Ctrl-C reaches only this process, which ends the others
                )
                remote_end.close()
                self._processes.append(process)
                self._connections.append(local_end)
            for rank, connection in enumerate(self._connections, start=1):
                self._wait_for_start(rank, connection)
        except BaseException:
            self.close(now=True)
            raise
        self._watcher.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, and so on."""
        return [process.pid for process in self._processes]

    def call_followers(self, name: str, *arguments: Any) -> None:
        """Make the followers execute a call.

        Args:
            name: The name of the call.
            *arguments: Its arguments, which are pickled.

        Raises:
            WorkerError: a follower has failed.
        """
        self.check()
        message = pickle.dumps((name, arguments), protocol=pickle.HIGHEST_PROTOCOL)
        for rank, connection in enumerate(self._connections, start=1):
            try:
                connection.send_bytes(message)
            except OSError:
                self.fail(f"rank {rank} has died")
                self.check()

    def check(self) -> None:
        """Raise WorkerError if a rank has failed."""
        if self.failed:
            raise WorkerError(
                f"the ranks of a tensor-parallel model have ended: {self.failed}; finished "
                "samples are kept; create a new LLM to continue"
            )

    def fail(self, reason: str) -> None:
        """End all other ranks; further calls raise errors. Only the first reason is kept."""
        if threading.current_thread() is not self._watcher:
            self._watcher.join(_REPORT_SECONDS)  # the thread may know the actual reason
        # Set this first: killing the ranks ends the collectives that this process waits for,
        # without valid results.
        self.failed = self.failed or reason
        for process in self._processes:
            with contextlib.suppress(OSError):
                process.kill()
        with contextlib.suppress(Exception):
            abort(self)

    def _wait_for_start(self, rank: int, connection: Connection) -> None:
        """Wait until a follower is about to join.

        Raises:
            WorkerError: it ends, or does not answer in time.
        """
        with contextlib.suppress(EOFError, OSError):
            if connection.poll(_START_SECONDS):
                connection.recv()
                return
        problem = self._describe_exit(rank) if connection.poll() else f"rank {rank} does not answer"
        raise WorkerError(
            f"a tensor-parallel model cannot be started: {problem}; check the messages above, "
            "or start again"
        )

    def _describe_exit(self, rank: int) -> str:
        """Describe how a follower died whose connection has closed, with its signal if any."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[rank - 1].wait(_EXIT_SECONDS)
        code = self._processes[rank - 1].returncode
        return f"rank {rank} has died" + (f" by signal {-code}" if code and code < 0 else "")

    def describe_death(self) -> str:
        """Return which follower a signal has ended, and which signal; empty if none has."""
        deadline = time.monotonic() + _REPORT_SECONDS  # for all of them together
        for rank, process in enumerate(self._processes, start=1):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(deadline - time.monotonic(), 0.0))
            if (process.returncode or 0) < 0:
                return self._describe_exit(rank)
        return ""

    def _watch_connections(self) -> None:
        """Wait until a follower reports a failure or dies."""
        ready = wait(self._connections)
        if self._closing:
            return
        connection = ready[0]
        assert isinstance(connection, Connection)
        rank = self._connections.index(connection) + 1
        try:
            reason = f"rank {rank}: {connection.recv()}"
        except (EOFError, OSError):
            reason = self._describe_exit(rank)
        if not self._closing:
            self.fail(reason)

    def close(self, *, now: bool = False) -> None:
        """End the followers and wait for them.

        Args:
            now: Kill them at once; they may be waiting for rank 0.
        """
        self._closing = True
        dead = now or bool(self.failed)
        for process in self._processes if dead else ():
            process.kill()
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send_bytes(pickle.dumps(("end", ())))
        for process in self._processes:
            try:
                process.wait(_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                dead = True
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join(_EXIT_SECONDS)  # it still reads the connections
        for connection in self._connections:
            connection.close()
        self.failed = self.failed or "the LLM was closed"
        if dead:
            with contextlib.suppress(Exception):
                abort(self)
        with contextlib.suppress(Exception):
            leave(self)
        shutil.rmtree(self.folder, ignore_errors=True)
        self._folder_lock.close()


def devices_of(size: int, device: str) -> torch.device:
    """Return the device of rank 0 among `size` ranks; rank r uses GPU r.

    Raises:
        InputError: there are fewer than `size` GPUs, or `device` names one of them.
    """
    resolved = resolve_device(device)
    if resolved.type != "cuda":
        return resolved
    if resolved.index is not None:
        raise InputError(
            f"device {device!r} selects one GPU, but {arg('tensor_parallel_size', size)} uses "
            f"the first {size} visible GPUs; set device to 'cuda', and select the GPUs with "
            "CUDA_VISIBLE_DEVICES"
        )
    if size > (num_visible := torch.cuda.device_count()):
        raise InputError(
            f"{arg('tensor_parallel_size', size)} requires {size} GPUs, but only {num_visible} are "
            "visible; check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", 0)


class RankGroup(Closeable):
    """Processes that compute models together, one model at a time; this process is rank 0."""

    def __init__(self, size: int, device: str = "auto") -> None:
        """Start the other ranks and join them.

        Raises:
            InputError: there are fewer GPUs than ranks, or this process has a group already.
            WorkerError: a rank cannot be started.
        """
        first = devices_of(size, device)
        check_free()
        self._followers = FollowerProcesses(size, first.type)
        with self._end_followers_on_error():
            self._ranks = join(0, size, first, self._followers.folder, self._followers)

    @property
    def pids(self) -> list[int]:
        """Process ids of ranks 1, 2, and so on."""
        return self._followers.pids

    def load(self, make: Callable[..., Model]) -> Model:
        """Load a model, each rank its shard. The group's previous model must not be used any more.

        Args:
            make: Loads the model, given `device` and `ranks`. It runs in every rank, so it must be
                picklable.

        Raises:
            WorkerError: a rank fails.
            TreegenError: any error that `make` raises.
        """
        with self._end_followers_on_error():
            self._followers.call_followers("load", make)
            return make(device=self._ranks.device, ranks=self._ranks)

    @contextlib.contextmanager
    def _end_followers_on_error(self) -> Iterator[None]:
        """If this rank fails, end the followers.

        Raises:
            WorkerError: a follower caused the failure; the message has its reason.
        """
        try:
            yield
        except TreegenError as error:
            death = "" if isinstance(error, WorkerError) else self._followers.describe_death()
            self._followers.close(now=True)
            if death:  # the cause of the error, such as a collective that failed in a check
                message = f"not all ranks could load the model: {death}"
                raise WorkerError(f"{message}; check the messages above") from error
            raise
        except BaseException as error:
            self._followers.fail(f"rank 0: {type(error).__name__}: {error}")
            failed = self._followers.failed
            self.close()
            if isinstance(error, Exception) and not failed.startswith("rank 0"):
                message = f"not all ranks could load the model: {failed}"
                raise WorkerError(f"{message}; check the messages above") from error
            raise

    def close(self) -> None:
        """End the other processes and wait for them."""
        self._followers.close()


def load_with_ranks(make: Callable[..., Model], size: int, device: str) -> Model:
    """Load a model that `size` processes compute together. The processes end with the model.

    Args:
        make: Loads the model in each rank, as in `RankGroup.load`.
        size: The number of processes.
        device: The device, "auto" or without an index; rank r uses GPU r.

    Raises:
        TreegenError: any error of `RankGroup` and its `load`.
    """
    group = RankGroup(size, device)
    model = group.load(make)
    model.close = weakref.finalize(model, group.close)
    return model


def load_tensor_parallel(path: str, size: int, *, device: str = "auto", **loading: Any) -> Model:
    """Load the model in a directory or with a hub name, each rank its shard.

    Configuration errors are raised before other processes are started.

    Args:
        path: A directory or a hub name.
        size: The number of ranks.
        device: The device, "auto" or without an index; rank r uses GPU r.
        **loading: Further arguments of `load_model`.

    Raises:
        TreegenError: as `load_model` and `load_with_ranks` do.
    """
    names = ("dtype", "revision", "trust_remote_code")
    spec_options = {name: loading[name] for name in names if name in loading}
    devices_of(size, device)
    load_spec(path, device=device, ranks=size, **spec_options)
    return load_with_ranks(functools.partial(load_model, path, **loading), size, device)


def load_from_options(options: EngineOptions) -> Model:
    """Load the model that options name, in this process alone or with a shard in each rank.

    Raises:
        TreegenError: as `load_model` and `load_tensor_parallel` do.
    """
    loading = options.loading()
    size = loading.pop("tensor_parallel_size")
    if size == 1:
        return load_model(options.model, impl=options.impl, **loading)
    return load_tensor_parallel(options.model, size, impl=options.impl, **loading)


def prepare_loaded(model: Model, tokenizer: Any, options: EngineOptions) -> Any:
    """Prepare a loaded model for a new LLM, and return its tokenizer.

    Args:
        model: The model, whose compiled layers are discarded.
        tokenizer: Its tokenizer.
        options: Options of the LLM.

    Raises:
        InputError: an option is only for loading, or the chat template cannot be read.
    """
    defaults = EngineOptions(model=options.model)
    for name in LOADING:
        if getattr(options, name) != getattr(defaults, name):
            raise InputError(
                f"{arg(name + '=')} has an effect only when a model is loaded, but this model "
                "is already loaded; remove the argument"
            )
    if (template := read_chat_template(options.chat_template)) is not None:
        tokenizer.chat_template = template
    model.reset()
    return tokenizer


def load_with_tokenizer(options: EngineOptions) -> tuple[Any, Model]:
    """Return the tokenizer and the model that options name."""
    tokenizer = load_tokenizer(options.model, **options.source, chat_template=options.chat_template)
    # Loading the processor first reports its errors before weights are read.
    processor = load_image_processor(options, tokenizer) if options.images else None
    model = load_from_options(options)
    if processor is not None:
        model.images = processor.enable_images(
            tokenizer, model.spec.vocab_size, keep_template=options.chat_template is not None
        )
    return tokenizer, model


def check_machine(options: EngineOptions, device: torch.device) -> None:
    """Check options before any model is read.

    Raises:
        InputError: the device does not support an option, whatever the model.
        CapacityError: the device has less memory than the cache takes.
    """
    choose(options.impl, device)
    if options.quantization == "fp8":
        check_fp8(device, "quantization")
    if options.kv_cache_dtype == "fp8":
        check_fp8(device, "kv_cache_dtype")
        check_reads_fp8(options.impl)
    if options.tensor_parallel_size > 1:
        devices_of(options.tensor_parallel_size, options.device)
    if options.reproducible:
        check_reproducible(device, options.impl, options.sizes(device.type).page_size)
    if options.cache_bytes is not None:
        check_cache_bytes(options.cache_bytes, device)
