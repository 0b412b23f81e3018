"""Triton kernels of the gated delta rule, a token at a time.

Legend: T rows, H value heads, G key heads, K key dim, V value dim, C channels, W width of a window,
P pages of a list, N updates of a page. `units` are pages of lists in all slots.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The number of rows decides where these begin. Triton need not compile a kernel for each alignment.
INPUTS = ("base", "target", "listed", "pages")
COUNTS = ("num_rows",)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit(do_not_specialize_on_alignment=("reads", "writes"))
def convolve(
    mixed, mixed_stride, windows, reads, writes, weights, out, C,
    W: tl.constexpr, SEEN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: some channels of one row. The window moves on by one token.

    A thread has whole channels, so it reads each place of a window before it writes there.
    """
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    source = windows + (tl.load(reads + row) * C + c) * W
    target = windows + (tl.load(writes + row) * C + c) * W
    x = tl.load(mixed + row * mixed_stride + c, mask=there, other=0.0)
    weight = tl.load(weights + c * SEEN + SEEN - 1, mask=there, other=0.0)
    total = x.to(tl.float32) * weight.to(tl.float32)
    for at in tl.static_range(1, W):
        before = tl.load(source + at, mask=there, other=0.0)
        if at > W - SEEN:
            weight = tl.load(weights + c * SEEN + at - (W - SEEN) - 1, mask=there, other=0.0)
            total += before.to(tl.float32) * weight.to(tl.float32)
        tl.store(target + at - 1, before, mask=there)
    tl.store(target + W - 1, x.to(target.dtype.element_ty), mask=there)
    total = total * _sigmoid(total)
    tl.store(out + row * C + c, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def _normed(pointer, there, scale):
    """A vector of unit length, times a scale."""
    x = tl.load(pointer, mask=there, other=0.0).to(tl.float32)
    return x * (scale / tl.sqrt(tl.sum(x * x, 0) + 1e-6))


@triton.jit
def _normed_rows(pointers, there, scale):
    x = tl.load(pointers, mask=there, other=0.0).to(tl.float32)
    return x * (scale / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]


@triton.jit
def _gate(a, a_log, dt_bias):
    return -tl.exp(a_log.to(tl.float32)) * _softplus(a.to(tl.float32) + dt_bias.to(tl.float32))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INPUTS)
def read_bases(
    mixed, states, base, out, num_rows, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: what some rows read with keys and queries from one head of their states.

    out: [2, T, H, V] float32. Rows with the same state are one matrix product, a row with a state
    of its own is a sum.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    live = row < num_rows
    there = live[:, None] & (k < K)[None, :]
    at = mixed + row.to(tl.int64)[:, None] * (2 * G * K + H * V)
    at += (head // (H // G)) * K + k[None, :]
    q_TK = _normed_rows(at, there, scale)
    k_TK = _normed_rows(at + G * K, there, 1.0)
    by_q = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    by_k = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    # Slot 0 is nobody's: rows that fill up a graph have it.
    slots = tl.load(base + row, mask=live, other=0)
    slot = tl.max(slots, 0)
    inside = (k < K)[:, None] & (v < V)[None, :]
    while slot > 0:
        mine = slots == slot
        place = states + (slot * H + head) * (K * V) + k[:, None] * V + v[None, :]
        s_KV = tl.load(place, mask=inside, other=0.0)
        if tl.sum(mine.to(tl.int32), 0) == 1:
            one_q = tl.sum(tl.where(mine[:, None], q_TK, 0.0), 0)
            one_k = tl.sum(tl.where(mine[:, None], k_TK, 0.0), 0)
            read_q = tl.sum(one_q[:, None] * s_KV, 0)
            read_k = tl.sum(one_k[:, None] * s_KV, 0)
            by_q += tl.where(mine[:, None], read_q[None, :], 0.0)
            by_k += tl.where(mine[:, None], read_k[None, :], 0.0)
        else:
            some_q = tl.where(mine[:, None], q_TK, 0.0)
            some_k = tl.where(mine[:, None], k_TK, 0.0)
            by_q += tl.dot(some_q, s_KV, input_precision="tf32x3")
            by_k += tl.dot(some_k, s_KV, input_precision="tf32x3")
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, 0)
    store = live[:, None] & (v < V)[None, :]
    target = out + (row.to(tl.int64)[:, None] * H + head) * V + v[None, :]
    tl.store(target, by_k, mask=store)
    tl.store(target + num_rows.to(tl.int64) * (H * V), by_q, mask=store)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INPUTS)
def read_lists(
    mixed, a, a_stride, b, b_stride, a_log, dt_bias, reads, gates, numbers, listed, pages, out,
    num_rows, scale, strength,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: one head of one row. It reads the row's list, and adds the token's update.

    reads: what `read_bases` wrote. gates, numbers: the states' memory as float32 and as the type
    of lists, which takes SIZE bytes. PAGE: bytes of a page's part for one key head. KEYS, VALUES:
    where these begin in it.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    each: tl.constexpr = H // G
    key_head = head // each
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    at = mixed + row * (2 * G * K + H * V)
    q_K = _normed(at + key_head * K + k, k < K, scale)
    k_K = _normed(at + G * K + key_head * K + k, k < K, 1.0)
    v_V = tl.load(at + 2 * G * K + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    gate = _gate(tl.load(a + row * a_stride + head), tl.load(a_log + head), tl.load(dt_bias + head))
    num = tl.load(listed + row).to(tl.int32)
    last = tl.maximum(num - 1, 0)
    page = tl.load(pages + (last // N) * num_rows + row)
    block = (page * G + key_head) * PAGE
    sum_before = tl.load(gates + block // 4 + (last % N) * each + head % each)
    total = gate + tl.where(num > 0, sum_before, 0.0)
    # Summed up at the end, because threads have to wait for each other to do so.
    by_q_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    by_k_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    n = tl.arange(0, BLOCK_N)
    page_N = tl.load(pages + (n // N) * num_rows + row, mask=n < num, other=0)
    for start in range(0, num, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < num
        block_N = (page_N * G + key_head) * PAGE
        at_n = n % N
        # The pages of the next updates are there when these have been read.
        ahead = n + BLOCK_N
        page_N = tl.load(pages + (ahead // N) * num_rows + row, mask=ahead < num, other=0)
        sums = tl.load(gates + block_N // 4 + at_n * each + head % each, mask=live, other=0.0)
        weight = tl.where(live, tl.exp(total - sums), 0.0)
        k_NK = tl.load(
            (numbers + (block_N + KEYS) // SIZE + at_n * K)[:, None] + k[None, :],
            mask=live[:, None] & (k < K)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        u_NV = tl.load(
            (numbers + (block_N + VALUES) // SIZE + (at_n * each + head % each) * V)[:, None]
            + v[None, :],
            mask=live[:, None] & (v < V)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        by_q_NV += (weight * tl.sum(k_NK * q_K[None, :], 1))[:, None] * u_NV
        by_k_NV += (weight * tl.sum(k_NK * k_K[None, :], 1))[:, None] * u_NV
    read = reads + (row * H + head) * V + v
    second = read + num_rows.to(tl.int64) * (H * V)
    decay = tl.exp(total)
    by_k = decay * tl.load(read, mask=v < V, other=0.0) + tl.sum(by_k_NV, 0)
    by_q = decay * tl.load(second, mask=v < V, other=0.0) + tl.sum(by_q_NV, 0)
    u_V = strength * _sigmoid(tl.load(b + row * b_stride + head).to(tl.float32)) * (v_V - by_k)
    by_q += tl.sum(k_K * q_K, 0) * u_V
    tl.store(out + (row * H + head) * V + v, by_q.to(out.dtype.element_ty), mask=v < V)
    new_page = tl.load(pages + (num // N) * num_rows + row)
    new_block = (new_page * G + key_head) * PAGE
    tl.store(gates + new_block // 4 + (num % N) * each + head % each, total)
    kind = numbers.dtype.element_ty
    new_u = numbers + (new_block + VALUES) // SIZE + ((num % N) * each + head % each) * V + v
    tl.store(new_u, u_V.to(kind), mask=v < V)
    if head % each == 0:
        new_k = numbers + (new_block + KEYS) // SIZE + (num % N) * K + k
        tl.store(new_k, k_K.to(kind), mask=k < K)


@triton.jit(do_not_specialize_on_alignment=("reads", "writes"))
def step_states(
    mixed, a, a_stride, b, b_stride, a_log, dt_bias, states, reads, writes, out, scale, strength,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: a part of one head of one row, whose state goes from one slot to another."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    at = mixed + row * (2 * G * K + H * V)
    q_K = _normed(at + (head // (H // G)) * K + k, k < K, scale)
    k_K = _normed(at + G * K + (head // (H // G)) * K + k, k < K, 1.0)
    v_V = tl.load(at + 2 * G * K + head * V + v, mask=v < V, other=0.0).to(tl.float32)
    gate = _gate(tl.load(a + row * a_stride + head), tl.load(a_log + head), tl.load(dt_bias + head))
    inside = (k < K)[:, None] & (v < V)[None, :]
    place = k[:, None] * V + v[None, :]
    source = states + (tl.load(reads + row) * H + head) * (K * V)
    target = states + (tl.load(writes + row) * H + head) * (K * V)
    s_KV = tl.load(source + place, mask=inside, other=0.0) * tl.exp(gate)
    u_V = strength * _sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    u_V *= v_V - tl.sum(s_KV * k_K[:, None], 0)
    s_KV += k_K[:, None] * u_V[None, :]
    tl.store(target + place, s_KV, mask=inside)
    read_V = tl.sum(s_KV * q_K[:, None], 0)
    tl.store(out + (row * H + head) * V + v, read_V.to(out.dtype.element_ty), mask=v < V)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INPUTS)
def fold_lists(
    states, gates, numbers, base, target, listed, pages, num_rows,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    N: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, VALUES: tl.constexpr,
    SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program: a part of one head of one state, made of another one and a list."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    each: tl.constexpr = H // G
    key_head = head // each
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    num = tl.load(listed + row).to(tl.int32)
    last = tl.maximum(num - 1, 0)
    page = tl.load(pages + (last // N) * num_rows + row)
    block = (page * G + key_head) * PAGE
    total = tl.load(gates + block // 4 + (last % N) * each + head % each)
    total = tl.where(num > 0, total, 0.0)
    inside = (k < K)[:, None] & (v < V)[None, :]
    place = k[:, None] * V + v[None, :]
    source = states + (tl.load(base + row) * H + head) * (K * V)
    s_KV = tl.load(source + place, mask=inside, other=0.0) * tl.exp(total)
    for start in range(0, num, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        live = n < num
        page_N = tl.load(pages + (n // N) * num_rows + row, mask=live, other=0)
        block_N = (page_N * G + key_head) * PAGE
        at_n = n % N
        sums = tl.load(gates + block_N // 4 + at_n * each + head % each, mask=live, other=0.0)
        weight = tl.where(live, tl.exp(total - sums), 0.0)
        k_NK = tl.load(
            (numbers + (block_N + KEYS) // SIZE + at_n * K)[:, None] + k[None, :],
            mask=live[:, None] & (k < K)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        u_NV = tl.load(
            (numbers + (block_N + VALUES) // SIZE + (at_n * each + head % each) * V)[:, None]
            + v[None, :],
            mask=live[:, None] & (v < V)[None, :], other=0.0,
        ).to(tl.float32)  # fmt: skip
        s_KV += tl.dot(tl.trans(k_NK), u_NV * weight[:, None], input_precision="tf32x3")
    target_at = states + (tl.load(target + row) * H + head) * (K * V)
    tl.store(target_at + place, s_KV, mask=inside)
