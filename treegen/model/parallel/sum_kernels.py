"""Triton kernels that add up the tensors of two GPUs through memory that both have mapped.

Both ranks launch the same kernel for the same number of words. A word is 32 bits: one float32
number, or two numbers of 16 bits. Program p of one rank exchanges words only with program p of the
other rank, so a launch must have at most as many programs as run at the same time.

Each program counts its launches. Exchanged words are in the half of the memory that the count
selects. A rank that has received words of launch n knows that all programs of launch n - 1 have
ended on the other rank, so launch n + 1 may overwrite their half.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

_DTYPES: Final = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}
_TAGGED_BLOCK: Final = 256  # words that a program exchanges at once
_TAGGED_WARPS: Final = 4
_POLLS: Final = 1024  # each takes about a microsecond
_STAGED_BLOCKS: Final = 2048, 8192  # minimum and maximum words of a piece


@triton.jit
def _unpack(words, DTYPE: tl.constexpr):
    """Return the two 16-bit numbers of each word as float32."""
    low = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    high = (words >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _add(words, others, DTYPE: tl.constexpr):
    """Return words [BLOCK] of the rounded sums of the numbers in two tensors of words."""
    if DTYPE.primitive_bitwidth == 32:
        total = words.to(tl.float32, bitcast=True) + others.to(tl.float32, bitcast=True)
    else:
        low, high = _unpack(words, DTYPE)
        other_low, other_high = _unpack(others, DTYPE)
        low = (low + other_low).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = (high + other_high).to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        total = (high << 16) | low
    return total.to(tl.int32, bitcast=True)


@triton.jit
def _store_sum(
    own, received, residual, out, at, mask, HAS_RESIDUAL: tl.constexpr, DTYPE: tl.constexpr
):
    """Store residual + (own + received) for words `at`; both sums are rounded."""
    total = _add(own, received, DTYPE)
    if HAS_RESIDUAL:
        total = _add(tl.load(residual + at, mask=mask, other=0), total, DTYPE)
    tl.store(out + at, total, mask=mask)


@triton.jit
def _is_stopped(stop):
    """Return whether the kernel shall stop waiting, the same in all threads of a program.

    Threads may read different numbers while the number changes, so all of them read it, and the
    maximum counts. No program has more than 512 threads.
    """
    return tl.max(tl.load(stop + tl.arange(0, 512) * 0, volatile=True)) != 0


@triton.jit
def _load_lines(pointers, mask):
    """Return lines as they are now in the memory."""
    return tl.load(pointers, mask=mask, other=0, volatile=True).to(tl.uint64, bitcast=True)


@triton.jit
def _sum_tagged(
    partial,
    residual,
    out,
    lines,
    peer_lines,
    launches,
    stop,
    num_words,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add up a small tensor. Each rank sends its words in lines of 64 bits: a word and a tag.

    The tag is the number of the launch. A line is written at once, so a line with the right tag has
    the word of this launch, and the kernel needs no flags. A stale line would be taken for a new
    one only if it was written exactly 2^32 launches before.

    Args:
        partial: Pointer to the words of this rank.
        residual: Pointer to words that are added to the sum; unused without HAS_RESIDUAL.
        out: Pointer to the sums; may be `partial`.
        lines: Pointer to the lines of this rank [2, HALF], which the other rank writes.
        peer_lines: Pointer to the lines of the other rank.
        launches: Pointer to each program's count of launches.
        stop: Pointer to a number in host memory; the kernel stops waiting if it is not 0.
        num_words: The number of words.
        HALF: Lines of a half of the memory.
        BLOCK: Words that a program exchanges at once.
        POLLS: Number of looks at memory after which the kernel looks at `stop`.
        HAS_RESIDUAL: Whether there is a residual.
        DTYPE: The dtype of the numbers.
    """
    program = tl.program_id(0)
    launch = tl.load(launches + program) + 1
    tag = launch.to(tl.uint32, bitcast=True).to(tl.uint64)
    half = (launch & 1).to(tl.int64) * HALF
    step = tl.num_programs(0) * BLOCK
    for start in range(program * BLOCK, num_words, step):
        at = start + tl.arange(0, BLOCK)
        mask = at < num_words
        words = tl.load(partial + at, mask=mask, other=0).to(tl.uint32, bitcast=True)
        tl.store(peer_lines + half + at, (tag << 32) | words.to(tl.uint64), mask=mask)
    for start in range(program * BLOCK, num_words, step):
        at = start + tl.arange(0, BLOCK)
        mask = at < num_words
        own = tl.load(partial + at, mask=mask, other=0)
        received = _load_lines(lines + half + at, mask)
        num_missing = tl.sum(((received >> 32 != tag) & mask).to(tl.int32))
        num_polls = 0
        while num_missing > 0:
            received = _load_lines(lines + half + at, mask)
            num_missing = tl.sum(((received >> 32 != tag) & mask).to(tl.int32))
            num_polls += 1
            if num_polls % POLLS == 0:
                num_missing = tl.where(_is_stopped(stop), 0, num_missing)
        received = (received & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
        _store_sum(own, received, residual, out, at, mask, HAS_RESIDUAL, DTYPE)
    tl.store(launches + program, launch)


@triton.jit
def _sum_staged(
    partial,
    residual,
    out,
    staged,
    peer_staged,
    flags,
    peer_flags,
    launches,
    stop,
    num_words,
    HALF: tl.constexpr,
    MAX_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
    POLLS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add up many words, which each rank copies to its own memory for the other rank to read.

    A program copies a piece of BLOCK words and then sets a flag of the other rank to the number of
    the launch. While the other rank reads this piece, the program copies its next one.

    Args:
        partial: Pointer to the words of this rank.
        residual: Pointer to words that are added to the sum; unused without HAS_RESIDUAL.
        out: Pointer to the sums; may be `partial`.
        staged: Pointer to the memory of this rank [2, HALF], which the other rank reads.
        peer_staged: Pointer to the memory of the other rank.
        flags: Pointer to the flags of this rank [programs, MAX_PIECES], which the other rank sets.
        peer_flags: Pointer to the flags of the other rank.
        launches: Pointer to each program's count of launches.
        stop: Pointer to a number in host memory; the kernel stops waiting if it is not 0.
        num_words: The number of words.
        HALF: Words of a half of the memory.
        MAX_PIECES: Maximum pieces of a program.
        BLOCK: Words of a piece.
        POLLS: Number of looks at memory after which the kernel looks at `stop`.
        HAS_RESIDUAL: Whether there is a residual.
        DTYPE: The dtype of the numbers.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    launch = tl.load(launches + program) + 1
    half = (launch & 1).to(tl.int64) * HALF
    num_pieces = tl.cdiv(num_words - program * BLOCK, num_programs * BLOCK)
    for step in range(num_pieces + 1):
        if step < num_pieces:
            at = (step * num_programs + program) * BLOCK + tl.arange(0, BLOCK)
            mask = at < num_words
            tl.store(staged + half + at, tl.load(partial + at, mask=mask, other=0), mask=mask)
            tl.debug_barrier()
            flag = peer_flags + program * MAX_PIECES + step
            tl.atomic_xchg(flag, launch, sem="release", scope="sys")
        if step > 0:
            piece = step - 1
            flag = flags + program * MAX_PIECES + piece
            # The other rank may already be in its next launch, but not further.
            ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - launch
            is_missing = (ahead != 0) & (ahead != 1)
            num_polls = 0
            while is_missing:
                ahead = tl.atomic_add(flag, 0, sem="acquire", scope="sys") - launch
                is_missing = (ahead != 0) & (ahead != 1)
                num_polls += 1
                if num_polls % POLLS == 0:
                    is_missing = is_missing & (_is_stopped(stop) == 0)
            tl.debug_barrier()
            at = (piece * num_programs + program) * BLOCK + tl.arange(0, BLOCK)
            mask = at < num_words
            received = tl.load(peer_staged + half + at, mask=mask, other=0)
            own = tl.load(partial + at, mask=mask, other=0)
            _store_sum(own, received, residual, out, at, mask, HAS_RESIDUAL, DTYPE)
    tl.store(launches + program, launch)


def sum_tagged(
    partial: Tensor,
    residual: Tensor | None,
    out: Tensor,
    lines: Tensor,
    peer_lines: Tensor,
    launches: Tensor,
    stop: Tensor,
) -> None:
    """Write residual + (the sum of `partial` over both ranks) to `out`; see `_sum_tagged`.

    Args:
        partial: The numbers of this rank, dense, at most N words.
        residual: Numbers to add, dense; None for none.
        out: The sums, dense.
        lines: Memory of this rank [2, N] in int64, zero before the first launch.
        peer_lines: The same memory of the other rank.
        launches: Counts of launches [programs] in int32, zero before the first launch.
        stop: A number [1] in int32 in pinned memory; the kernel stops waiting if it is not 0.
    """
    words = _view_words(partial)
    _sum_tagged[(launches.numel(),)](
        words,
        words if residual is None else _view_words(residual),
        _view_words(out),
        lines,
        peer_lines,
        launches,
        stop,
        words.numel(),
        HALF=lines.numel() // 2,
        BLOCK=_TAGGED_BLOCK,
        POLLS=_POLLS,
        HAS_RESIDUAL=residual is not None,
        DTYPE=_DTYPES[partial.dtype],
        num_warps=_TAGGED_WARPS,
    )


def sum_staged(
    partial: Tensor,
    residual: Tensor | None,
    out: Tensor,
    staged: Tensor,
    peer_staged: Tensor,
    flags: Tensor,
    peer_flags: Tensor,
    launches: Tensor,
    stop: Tensor,
) -> None:
    """Write residual + (the sum of `partial` over both ranks) to `out`; see `_sum_staged`.

    Args:
        partial: The numbers of this rank, dense.
        residual: Numbers to add, dense; None for none.
        out: The sums, dense.
        staged: Memory of this rank [2, N] in int32.
        peer_staged: The same memory of the other rank.
        flags: Flags of this rank in int32, several per program, zero before the first launch.
        peer_flags: The flags of the other rank.
        launches: Counts of launches [programs] in int32, zero before the first launch.
        stop: A number [1] in int32 in pinned memory; the kernel stops waiting if it is not 0.
    """
    num_programs = launches.numel()
    half, max_pieces = staged.numel() // 2, flags.numel() // num_programs
    words, sums = _view_words(partial), _view_words(out)
    min_block, max_block = _STAGED_BLOCKS
    per_program = triton.next_power_of_2(triton.cdiv(words.numel(), num_programs))
    block = min(max(per_program, min_block), max_block)
    max_words = min(half, num_programs * max_pieces * block)
    addends = words if residual is None else _view_words(residual)
    for start in range(0, words.numel(), max_words):
        part = slice(start, start + max_words)
        _sum_staged[(num_programs,)](
            words[part],
            addends[part],
            sums[part],
            staged,
            peer_staged,
            flags,
            peer_flags,
            launches,
            stop,
            words[part].numel(),
            HALF=half,
            MAX_PIECES=max_pieces,
            BLOCK=block,
            POLLS=_POLLS,
            HAS_RESIDUAL=residual is not None,
            DTYPE=_DTYPES[partial.dtype],
            num_warps=8 if block == min_block else 16,
        )


def _view_words(tensor: Tensor) -> Tensor:
    return tensor.view(-1).view(torch.int32)
