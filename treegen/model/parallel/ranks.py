"""The processes that compute one model together, and what they exchange.

Each has a part of every layer (tensor parallelism). Where a layer's output is a sum over parts, the
ranks add theirs up; where it is put together of parts, they gather them. Both are operators that
the compiler does not look into, and on GPUs both can be part of a CUDA graph.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from treegen.errors import InputError

TIMEOUT: Final = 900.0
"""Seconds after which a rank that waits for the others gives up."""
_POLL_SECONDS: Final = 0.1
_GRACE: Final = 2.0  # seconds for a join to end by itself once a rank has died

# Its name changes from torch 2.13 on.
_all_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_here: list[Ranks] = []  # of this process, for the operators; one at most
_WATCHDOG: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a process group is made
_leaving: Final = threading.RLock()  # held while a process group is aborted


class RankLeader(Protocol):
    """What rank 0 has of the others."""

    @property
    def failed(self) -> str:
        """Why they have ended; empty as long as they work."""
        ...

    def call_followers(self, name: str, *arguments: Any) -> None:
        """Have them do a call, as this process does."""
        ...

    def check(self) -> None:
        """Raise WorkerError if one has failed."""
        ...

    def fail(self, told: str) -> None:
        """End them, because this process failed in what all do together."""
        ...


@dataclass(eq=False, slots=True)
class Ranks:
    """The ranks of one model, as one of them sees them.

    rank: this one's number. Rank 0 leads: it decides what is computed.
    size: how many there are.
    device: where this one computes.
    lead: what rank 0 has of the others; None in these.
    """

    rank: int
    size: int
    device: torch.device
    lead: RankLeader | None

    def check(self) -> None:
        """Raise WorkerError if a follower of this rank has failed."""
        if self.lead is not None:
            self.lead.check()

    def all_reduce_min(self, number: int) -> int:
        """The least of a number over all ranks; each must call this."""
        found = torch.tensor([number])
        dist.all_reduce(found, op=dist.ReduceOp.MIN)
        return int(found)

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a dense tensor with that of rank 0; each rank must call this."""
        dist.broadcast(tensor, src=0)
        return tensor

    def get_vocab_range(self, vocab_size: int) -> tuple[int, int, int]:
        """This rank, the first token of its part of the vocabulary, and how many tokens it has."""
        width = -(-vocab_size // self.size)
        first = self.rank * width
        return self.rank, first, max(min(vocab_size - first, width), 0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """The tensors [..., W] of all ranks side by side, dense; each rank must call this."""
        whole: Tensor = gather_columns(tensor, self.size)
        return whole

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """A dense tensor overwritten by the sum over all ranks; each rank must call this."""
        return sum_over_ranks(tensor)

    def whole(self, logits_SV: Tensor, vocab_size: int) -> Tensor:
        """Logits [S, V] of the whole vocabulary, put together of every rank's part of it."""
        return self.all_gather(logits_SV)[:, :vocab_size]


def check_ranks(ranks: Ranks | None) -> None:
    """Refuse what are no ranks.

    Raises:
        InputError: they are not.
    """
    if ranks is not None and not isinstance(ranks, Ranks):
        raise InputError(
            f"ranks must be those of a group of processes, got {ranks!r:.60}; leave it out, or "
            "give tensor_parallel_size to LLM"
        )


def check_free() -> None:
    """Raise InputError if this process belongs to ranks already."""
    if dist.is_initialized():
        raise InputError(
            "this process has a tensor-parallel model already, or a process group of its own; "
            "close() that LLM first, or use another process"
        )


def join(
    rank: int,
    size: int,
    device: torch.device,
    folder: Path,
    lead: RankLeader | None = None,
) -> Ranks:
    """Become one of the ranks; waits until all have joined.

    Args:
        folder: An empty folder that all ranks can write to.
        lead: As in `Ranks`.

    Raises:
        InputError: this process belongs to other ranks already.
    """
    check_free()
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has its own of
        with _survive_nccl_errors() if lead is not None else nullcontext():
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.FileStore(str(folder / "store"), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=TIMEOUT),
                **options,
            )

    if lead is None:
        begin()
    else:
        _run_while_working(begin, lead)
    ranks = Ranks(rank, size, device, lead)
    _here.append(ranks)
    ranks.check()  # a rank that died before this line was not found by `leave`
    return ranks


@contextmanager
def _survive_nccl_errors() -> Iterator[None]:
    """Make process groups whose NCCL watchdog does not end this process when a rank is gone.

    torch's default is to abort the process. Rank 0 raises WorkerError and goes on, so it switches
    the watchdog's handling off, unless the user has set the variable.
    """
    if _WATCHDOG in os.environ:
        yield
        return
    os.environ[_WATCHDOG] = "0"
    try:
        yield
    finally:
        del os.environ[_WATCHDOG]


def _run_while_working(begin: Callable[[], None], lead: RankLeader) -> None:
    """Run a call that waits for the other ranks, and stop waiting soon after one of them has died.

    Nothing can interrupt the call itself: gloo and NCCL wait for a rank that will never come. So it
    runs in a thread of its own, which is given up then.

    Raises:
        WorkerError: a rank has died.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            begin()
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="treegen-join", daemon=True).start()
    while not wait([done], _POLL_SECONDS).done:
        if lead.failed and not wait([done], _GRACE).done:
            # torch counts groups, and the ranks of the next one must have the same count.
            dist.distributed_c10d._world.group_count = 0
            lead.check()
    done.result()


def leave(lead: RankLeader) -> None:
    """Abort the process group that `join` made for a lead. Ranks that wait for this one fail.

    Any thread may call this at any time. The first call aborts the group, calls at the same time
    wait for it, and later ones do nothing: two aborts at once end the process.

    Args:
        lead: what `join` was given. A group that belongs to another one stays.
    """
    with _leaving:
        if _here and _here[0].lead is lead:
            _here.clear()
            # Aborted, because what is destroyed in order would wait for ranks that are gone.
            dist.distributed_c10d._abort_process_group()


_ALONE: Final = "a part of a model is computed without the other ranks"


@torch.library.custom_op("treegen::sum_over_ranks", mutates_args=("partial",))
def _sum_over_ranks(partial: Tensor) -> None:
    """Add up what the ranks have, in place."""
    assert _here, _ALONE
    dist.all_reduce(partial)


@_sum_over_ranks.register_fake
def _(partial: Tensor) -> None:
    return None


@torch.library.custom_op("treegen::linear_over_ranks", mutates_args=())
def linear_over_ranks(input: Tensor, weight: Tensor) -> Tensor:
    """The sum over all ranks of input [..., I] @ weight [O, I].T."""
    assert _here, _ALONE
    partial = linear(input, weight)
    dist.all_reduce(partial)
    return partial


@linear_over_ranks.register_fake
def _(input: Tensor, weight: Tensor) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


@torch.library.custom_op("treegen::gather_columns", mutates_args=())
def gather_columns(part: Tensor, size: int) -> Tensor:
    """The parts [..., W] of `size` ranks as one dense [..., size * W]."""
    assert _here, _ALONE
    whole = part.new_empty(size, *part.shape)
    _all_gather(whole.view(-1), part.contiguous().view(-1))
    # Where the parts have one column, a reshape alone would be a view that is not dense.
    return whole.movedim(0, -2).reshape(*part.shape[:-1], size * part.shape[-1]).contiguous()


@gather_columns.register_fake
def _(part: Tensor, size: int) -> Tensor:
    return part.new_empty(*part.shape[:-1], size * part.shape[-1])


def sum_over_ranks(partial: Tensor) -> Tensor:
    """The sum of a dense tensor over all ranks, which takes its place."""
    _sum_over_ranks(partial)
    return partial
