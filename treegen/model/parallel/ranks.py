"""The processes that compute one model together, and their collectives.

Each has a shard of every layer (tensor parallelism). Ranks sum outputs that are sums over shards,
and gather outputs that are split into shards. Both collectives are operators that the compiler
treats as opaque, and on GPUs both can be captured in a CUDA graph.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from treegen.common.lifetimes import use_environment_default
from treegen.common.synchronization import run_in_daemon
from treegen.errors import CapacityError, InputError, arg
from treegen.model.parallel.shared_memory import SHARING_SIZES, SharedBuffer, share_memory

TIMEOUT: Final = 900.0
"""Seconds after which a rank stops waiting for the others."""
_POLL_SECONDS: Final = 0.1
_JOIN_SECONDS: Final = 2.0  # seconds for a join to finish once a rank has died
_ABORT_SECONDS: Final = 30.0  # seconds for an abort to finish

# torch 2.13 renames this function.
_all_gather: Final[Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_joined: list[Ranks] = []  # the ranks of this process, for the operators; at most one item
_aborted: list[Ranks] = []  # the ranks whose process group is being aborted; at most one item
_WATCHDOG: Final = "TORCH_NCCL_ASYNC_ERROR_HANDLING"  # read when a process group is made
_abort_lock: Final = threading.RLock()  # held while ranks are taken from `_joined`


class RankLeader(Protocol):
    """Rank 0's control over the other ranks."""

    @property
    def failed(self) -> str:
        """The reason why the ranks have ended; empty while they work."""

    @property
    def folder(self) -> Path:
        """A folder that all ranks share."""

    def call_followers(self, name: str, *arguments: Any) -> None:
        """Make the followers execute the same call as this process."""

    def check(self) -> None:
        """Raise WorkerError if a rank has failed."""

    def fail(self, reason: str) -> None:
        """End the other ranks because this process failed in a shared computation."""


class AgreedError(CapacityError):
    """A rank has not enough memory. All ranks raise this error, and can be used again."""


@dataclass(eq=False, slots=True)
class Ranks:
    """The ranks of one model, from the view of one of them."""

    rank: int
    """The number of this rank. Rank 0 leads: it decides what is computed."""
    size: int
    """The number of ranks."""
    device: torch.device
    """The device of this rank."""
    leader: RankLeader | None
    """Rank 0's control over the other ranks; None in the other ranks."""
    fixed_order: bool = False
    """Whether the ranks' outputs are added in the order of ranks, whatever the number of rows."""
    graphs: WeakSet[torch.cuda.CUDAGraph] = field(default_factory=WeakSet)
    """CUDA graphs that contain collectives of these ranks."""
    shared: SharedBuffer | None = None
    """Memory that all ranks have mapped; None if NCCL or gloo computes all sums."""
    abort_done: Future[None] | None = None
    """Done when an abort in the background has ended; None before one has begun."""

    def check(self) -> None:
        """Raise WorkerError if a follower of this rank has failed."""
        if self.leader is not None:
            self.leader.check()

    def all_reduce_min(self, number: int) -> int:
        """Return the minimum of a number over all ranks. A collective: each rank must call this."""
        lowest = torch.tensor([int(number)])
        dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
        return int(lowest)

    def agree(self, able: bool) -> bool:
        """Return whether all ranks are able to do something. A collective.

        Raises:
            WorkerError: a rank has died, so this group may be gone, and another one in its place.
        """
        self.check()
        return bool(self.all_reduce_min(able))

    def raise_together(self, error: CapacityError | None) -> None:
        """Raise an error in all ranks if any rank has one. A collective.

        Args:
            error: The error of this rank; None if it has none.

        Raises:
            AgreedError: a rank has an error.
            WorkerError: as for `agree`.
        """
        if not self.agree(error is None):
            raise AgreedError(
                str(error)
                if error is not None
                else f"the cache does not fit the memory of another rank; set {arg('memory')}"
            ) from error

    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a dense tensor with that of rank 0. A collective: each rank must call this."""
        dist.broadcast(tensor, src=0)
        return tensor

    def get_vocab_range(self, vocab_size: int) -> tuple[int, int, int]:
        """Return this rank, the first token of its vocabulary shard, and the size of the shard."""
        width = -(-vocab_size // self.size)
        first = self.rank * width
        return self.rank, first, max(min(vocab_size - first, width), 0)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the tensors [..., W] of all ranks side by side, dense. A collective."""
        gathered: Tensor = gather_columns(tensor, self.size)
        return gathered

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Overwrite a dense tensor with its sum over all ranks and return it. A collective."""
        return _sum_in_place(tensor)

    def gather_logits(self, logits_SV: Tensor, vocab_size: int) -> Tensor:
        """Return logits [S, V] of the whole vocabulary, gathered from the shards of all ranks."""
        return self.all_gather(logits_SV)[:, :vocab_size]


def check_ranks(ranks: Ranks | None) -> None:
    """Check that an argument is `Ranks` or None.

    Raises:
        InputError: it is something else.
    """
    if ranks is not None and not isinstance(ranks, Ranks):
        raise InputError(
            f"ranks must be an instance of Ranks, got {ranks!r:.60}; remove this argument, or "
            f"pass {arg('tensor_parallel_size')} to LLM"
        )


def check_free() -> None:
    """Raise InputError if this process already belongs to ranks."""
    if dist.is_initialized():
        raise InputError(
            "this process already has a tensor-parallel model or a process group; close() that "
            "LLM first, or use another process"
        )


def join(
    rank: int, size: int, device: torch.device, folder: Path, leader: RankLeader | None = None
) -> Ranks:
    """Become one of the ranks; wait until all have joined.

    Args:
        rank: The number of this rank.
        size: The number of ranks.
        device: The device of this rank.
        folder: An empty folder that all ranks can write to.
        leader: As in `Ranks`.

    Raises:
        InputError: this process already belongs to other ranks.
        WorkerError: a rank has died, or rank 0 cannot join the others.
    """
    check_free()
    # torch names groups by a count of all attempts, and all ranks need the same name.
    dist.distributed_c10d._world.group_count = 0
    options: dict[str, Any] = {}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        options["device_id"] = device

    ranks = Ranks(rank, size, device, leader)

    def begin() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # which each thread has its own of
        # If a rank is gone, NCCL's watchdog ends the process by default. Rank 0 goes on, and
        # raises WorkerError, so its watchdog is off, unless the user has set the variable.
        with nullcontext() if leader is None else use_environment_default(_WATCHDOG, "0"):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=dist.FileStore(str(folder / "store"), size),  # type: ignore[attr-defined]
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=TIMEOUT),
                **options,
            )
            _joined.append(ranks)  # so that the group is aborted if sharing memory fails
            ranks.shared = share_memory(rank, size, device, ranks.agree)

    if leader is None:
        begin()
    else:
        _run_while_working(begin, leader)
    ranks.check()  # `leave` did not see this group if a rank died before
    return ranks


def _run_while_working(begin: Callable[[], None], leader: RankLeader) -> None:
    """Run a call that waits for the other ranks; stop waiting soon after one of them has died.

    The call itself cannot be interrupted: gloo and NCCL would wait for a dead rank. So it runs in
    its own thread, which is then abandoned.

    Raises:
        WorkerError: a rank has died, or this rank cannot join the others.
    """
    done = run_in_daemon("treegen-join", begin)
    while not wait([done], _POLL_SECONDS).done:
        if leader.failed and not wait([done], _JOIN_SECONDS).done:
            leader.check()
    try:
        done.result()
    except RuntimeError as error:  # such as the end of gloo's time limit
        leader.fail(f"rank 0 cannot join the other ranks: {error}")
        leader.check()
        raise


def abort(leader: RankLeader) -> None:
    """Begin to abort the process group that `join` made for a leader whose other ranks are dead.

    Any thread may call this at any time. NCCL finishes an abort once no CUDA graph contains its
    collectives, so this does not wait for the end; `leave` does.

    Args:
        leader: The leader that `join` was given. A group of another leader is left alone.
    """
    with _abort_lock:
        if _joined and (ranks := _joined[0]).leader is leader:
            if ranks.shared is not None:
                ranks.shared.release()
            ranks.abort_done = run_in_daemon("treegen-abort", _abort_group)
            # Only now, so that `leave` aborts the group if no thread can be started (during exit).
            _aborted[:] = [_joined.pop()]


def leave(leader: RankLeader) -> None:
    """Abort the process group that `join` made for a leader, and wait until it is gone.

    This also resets the CUDA graphs that contain its collectives, so no other thread may be
    computing a pass.

    Args:
        leader: As in `abort`.
    """
    with _abort_lock:
        if _joined and _joined[0].leader is leader:
            _reset_graphs(_joined.pop())  # pop, because two aborts end the process
            _abort_group()  # in this thread, because no thread can be started during exit
            return
    for ranks in [ranks for ranks in _aborted if ranks.leader is leader]:
        _reset_graphs(ranks)
        assert ranks.abort_done is not None
        wait([ranks.abort_done], _ABORT_SECONDS)


def _reset_graphs(ranks: Ranks) -> None:
    for graph in list(ranks.graphs):
        graph.reset()


def _abort_group() -> None:
    """Abort the process group; an orderly destruction would wait for dead ranks."""
    dist.distributed_c10d._abort_process_group()


_NOT_JOINED: Final = "a part of a model is computed without the other ranks"


@torch.library.custom_op("treegen::sum_over_ranks", mutates_args=())
def sum_over_ranks(partial: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the sum of a dense tensor over all ranks, plus a residual.

    Args:
        partial: This rank's tensor.
        residual: A tensor that all ranks have, of as many numbers; None for no residual.
    """
    assert _joined, _NOT_JOINED
    output = torch.empty_like(partial)
    if not _sum_in_shared_memory(output, partial, residual):
        _sum_in_place(output.copy_(partial), residual)
    return output


@sum_over_ranks.register_fake
def _(partial: Tensor, residual: Tensor | None = None) -> Tensor:
    return torch.empty_like(partial)


@torch.library.custom_op("treegen::linear_over_ranks", mutates_args=())
def linear_over_ranks(input: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """Return the sum over all ranks of the products with their shards, plus a residual.

    Args:
        input: This rank's shard of the inputs [..., I].
        weight: This rank's shard of the weight [O, I].
        residual: A tensor that all ranks have, of as many numbers as the output [..., O]; None for
            no residual.
    """
    return _sum_in_place(linear(input, weight), residual)


@linear_over_ranks.register_fake
def _(input: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    return input.new_empty(*input.shape[:-1], weight.shape[0])


def can_add_residuals() -> bool:
    """Return whether sums over ranks shall add residuals, as they do faster in shared memory.

    In a fixed order, results must not depend on whether two ranks share memory.
    """
    return any(
        ranks.shared is not None or (ranks.fixed_order and ranks.size in SHARING_SIZES)
        for ranks in _joined
    )


def _sum_in_place(partial: Tensor, residual: Tensor | None = None) -> Tensor:
    """Overwrite a dense tensor with its sum over all ranks, plus a residual, and return it."""
    assert _joined, _NOT_JOINED
    ranks = _joined[0]
    if _sum_in_shared_memory(partial, partial, residual):
        return partial
    if ranks.fixed_order and ranks.size > 2 and partial.is_floating_point():
        _sum_in_order(partial, ranks.size)
    else:
        dist.all_reduce(partial)  # a sum of two numbers, or of integers, has one result
    return partial if residual is None else partial.add_(residual.view_as(partial))


def _sum_in_shared_memory(output: Tensor, partial: Tensor, residual: Tensor | None) -> bool:
    """Write the sum over ranks plus a residual to `output`; return False if it was not possible."""
    shared = _joined[0].shared
    if shared is None or not shared.can_sum(partial):
        return False
    if residual is not None and not shared.can_sum(residual):
        residual = residual.clone(memory_format=torch.contiguous_format)
    shared.sum_into(output, partial, residual)
    return True


def _sum_in_order(partial: Tensor, size: int) -> None:
    """Add up the tensors of all ranks in the order of ranks."""
    parts = _gather(partial.contiguous(), size)
    total = parts[0].to(torch.promote_types(partial.dtype, torch.float32))
    for part in parts[1:]:
        total = total + part
    partial.copy_(total)


@torch.library.custom_op("treegen::gather_columns", mutates_args=())
def gather_columns(part: Tensor, size: int) -> Tensor:
    """Return the shards [..., W] of `size` ranks as one dense tensor [..., size * W]."""
    gathered = _gather(part.contiguous(), size)
    # If the shards have one column, a reshape alone would be a view that is not dense.
    return gathered.movedim(0, -2).reshape(*part.shape[:-1], size * part.shape[-1]).contiguous()


def _gather(part: Tensor, size: int) -> Tensor:
    """Return the tensors [size, ...] of all ranks."""
    assert _joined, _NOT_JOINED
    gathered = part.new_empty(size, *part.shape)
    _all_gather(gathered.view(-1), part.view(-1))
    return gathered


@gather_columns.register_fake
def _(part: Tensor, size: int) -> Tensor:
    return part.new_empty(*part.shape[:-1], size * part.shape[-1])
