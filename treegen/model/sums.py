"""Sums over the GPUs of one machine: by NCCL, or where asked for in memory that GPUs share.

NCCL adds up anything. Below some megabytes, kernels that read the other GPUs' memory directly take
half of its time. The sizes below are where they won on H200s. Steps of few rows gain nothing by it,
those of a thousand some percent. So it must be asked for.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import product
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

SWITCH: Final = "TREEGEN_SYMMETRIC_MEMORY"
"""The environment variable that, set to 1, asks for shared memory where it is quicker."""
_ONE_SHOT: Final = 2**17  # bytes up to which each GPU reads all parts of all others
_TWO_SHOT: Final = {2: 2**25, 4: 2**23}  # and up to which each adds up a part, by number of GPUs
_ALIGNED: Final = 16  # bytes that a GPU reads at once
_RELEASE: Final = 3.0  # seconds


class Sums:
    """Adds up tensors over GPUs, in the same order on each; its calls are collective."""

    def __init__(self, rank: int, size: int, device: torch.device) -> None:
        """Share memory with the other GPUs if that is wanted, all can, and the sums are right."""
        self._rank, self._size = rank, size
        self._most = 0
        self._handle: Any = None
        wanted = os.environ.get(SWITCH) == "1" and size in _TWO_SHOT
        is_right = wanted
        if wanted:
            try:
                self._share(_TWO_SHOT[size], device)
            except Exception:
                is_right = False
        if self._all(is_right, device):
            self._most, is_right = _TWO_SHOT[size], False
            with suppress(Exception):
                is_right = self._is_right(device)
            if not self._all(is_right, device):
                self._most = 0

    @property
    def shares_memory(self) -> bool:
        """Whether small sums are done in shared memory."""
        return self._most > 0

    def add(self, partial: Tensor) -> None:
        """Overwrite a dense tensor by the sum of those of all GPUs."""
        if not self._fits(partial.nbytes, partial.dtype):
            dist.all_reduce(partial)
            return
        flat = partial.view(-1)
        shared = self._buffer[: partial.nbytes].view(partial.dtype)
        shared.copy_(flat)
        self._add_shared(shared, flat)

    def linear(self, input: Tensor, weight: Tensor) -> Tensor:
        """The sum over all GPUs of input @ weight.T, which are written where all can read them."""
        numbers, outputs = input.shape[:-1].numel(), len(weight)
        size = numbers * outputs * input.itemsize
        if not self._fits(size, input.dtype):
            partial = linear(input, weight)
            dist.all_reduce(partial)
            return partial
        shared = self._buffer[:size].view(input.dtype)
        torch.mm(input.reshape(numbers, -1), weight.t(), out=shared.view(numbers, outputs))
        output = input.new_empty(*input.shape[:-1], outputs)
        self._add_shared(shared, output.view(-1))
        return output

    def _fits(self, size: int, dtype: torch.dtype) -> bool:
        fits = 0 < size <= self._most and size % (_ALIGNED * self._size) == 0
        return fits and dtype in (torch.bfloat16, torch.float32)

    def _add_shared(self, shared: Tensor, output: Tensor) -> None:
        """Write the sum of what all GPUs have in shared memory. It may be overwritten then."""
        ops = torch.ops.symm_mem
        if output.nbytes <= _ONE_SHOT:
            ops.one_shot_all_reduce_out(shared, "sum", self._name, output)
        else:
            ops.two_shot_all_reduce_out(shared, "sum", self._name, output)

    def release(self) -> None:
        """Let kernels end that wait for a GPU whose process is gone; their sums are wrong.

        They wait until others have written to their signals, and taken what they wrote.
        """
        if self._handle is None:
            return
        stream = torch.cuda.Stream(self._buffer.device)
        end = time.monotonic() + _RELEASE
        with torch.cuda.stream(stream):
            while time.monotonic() < end:
                for rank, pad in enumerate(self._pads):
                    pad.fill_(1 if rank == self._rank else 0)
                time.sleep(0.001)

    def _share(self, size: int, device: torch.device) -> None:
        import torch.distributed._symmetric_memory as symmetric

        assert dist.group.WORLD is not None
        self._name = dist.group.WORLD.group_name
        self._buffer = symmetric.empty(size, dtype=torch.uint8, device=device)
        self._handle = symmetric.rendezvous(self._buffer, self._name)
        self._pads = [
            self._handle.get_signal_pad(rank, dtype=torch.int32) for rank in range(self._size)
        ]
        # Loaded now, for no kernel can be loaded while others wait.
        torch.empty(4, dtype=torch.int32, device=device).fill_(1)

    def _is_right(self, device: torch.device) -> bool:
        """Compare with NCCL's sums of other numbers each time, one right after another."""
        generator = torch.Generator(device).manual_seed(self._rank)
        right = torch.ones((), dtype=torch.bool, device=device)

        def compare(got: Tensor, want: Tensor) -> None:
            right.logical_and_(((got - want).abs() <= 0.1 + 0.02 * want.abs()).all())

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device)

        for size in (4096, _ONE_SHOT, 2 * _ONE_SHOT, self._most) * 4:
            for dtype in (torch.bfloat16, torch.float32):
                mine = numbers(size // dtype.itemsize).to(dtype)
                want = mine.clone()
                self.add(mine)
                self.add(twice := mine.clone())
                dist.all_reduce(want)
                compare(mine, want)
                compare(twice, self._size * want)
        for rows, dtype in product((1, 3, 64, 1024), (torch.bfloat16, torch.float32)):
            inputs, weight = numbers(rows, 16).to(dtype), numbers(256, 16).to(dtype)
            want = linear(inputs, weight)
            dist.all_reduce(want)
            compare(self.linear(inputs, weight), want)
        return bool(right)

    def _all(self, flag: bool, device: torch.device) -> bool:
        """Whether a flag is set on all GPUs."""
        flags = torch.tensor([int(flag)], device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        return bool(flags.item())
