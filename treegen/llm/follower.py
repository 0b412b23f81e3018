"""A rank of a tensor-parallel model that executes the calls of rank 0.

It has no scheduler and makes no draws itself. See `treegen.model.rank_processes`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from treegen.common.device import use_device
from treegen.engine.compute.model_runner import ModelRunner
from treegen.llm.llm import LLM
from treegen.model.model import Model
from treegen.model.parallel.ranks import AgreedError, Ranks, join
from treegen.model.training.rank_updates import write_shard


class Follower:
    """One rank, with its part of the model and of the cache."""

    def __init__(self, ranks: Ranks) -> None:
        """Set up a rank that has loaded nothing yet."""
        self._ranks = ranks
        self._model: Model | None = None
        self._llm: LLM | None = None
        self._runner: ModelRunner | None = None

    def load(self, make: Callable[..., Model]) -> None:
        """Load this rank's part of a model."""
        self._model = make(device=self._ranks.device, ranks=self._ranks)

    def engine(self, options: dict[str, Any]) -> None:
        """Create a cache, and compile the model, with the options of rank 0's LLM."""
        assert self._model is not None
        self._llm = self._runner = None
        with contextlib.suppress(AgreedError):  # rank 0 raises it, too
            self._llm = llm = LLM(self._model, tokenizer=(), **options)
            self._runner = llm.engine.make_model_runner()

    def update(self, path: Path) -> None:
        """Read this rank's part of new weights from a checkpoint."""
        assert self._model is not None
        write_shard(self._model, path)
        self._ranks.all_reduce_min(1)  # rank 0 waits in the same collective

    def execute_call(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Execute a call of rank 0."""
        if name in ("load", "engine", "update"):
            getattr(self, name)(*arguments)
        else:
            assert self._runner is not None
            getattr(self._runner, name)(*arguments)


def main() -> None:
    """Execute the calls of rank 0 until it sends "end" or is gone."""
    descriptor, rank, size, kind, folder, _leader = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)  # prints the stack of this rank
    warnings.simplefilter("ignore")  # rank 0 shows the same warnings
    logging.set_verbosity_error()
    connection = Connection(int(descriptor))
    code = 0
    try:
        _follow(connection, int(rank), int(size), kind, Path(folder))
    except (EOFError, ConnectionError):
        pass
    except BaseException as error:
        code = 1
        message = " ".join(f"{type(error).__name__}: {error}".split())
        with contextlib.suppress(OSError):
            connection.send(message)
    # This skips torch's clean-up, which would wait for ranks that are gone.
    os._exit(code)


def _follow(connection: Connection, rank: int, size: int, kind: str, folder: Path) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cpu":
        torch.set_num_threads(max(torch.get_num_threads() // size, 1))
    connection.send("ready")
    ranks = join(rank, size, device, folder)
    follower = Follower(ranks)
    with use_device(device):
        while True:
            name, arguments = pickle.loads(connection.recv_bytes())
            if name == "end":
                return
            follower.execute_call(name, arguments)
