"""Triton kernels of the gated delta rule and of Mamba2, a token at a time.

Legend: T rows, H value heads, G key heads, K key dim, V value dim, C channels, W width of a window,
P pages of a list, N updates of a page. Q_AT, K_AT, V_AT: channels at which queries, keys and values
begin. CORRECTS: the rule is the delta rule, whose queries and keys have unit length. Mamba2 adds
`skip` times a token's own value in place of it.
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
    mixed,
    mixed_stride,
    windows,
    whole_windows,
    reads,
    writes,
    weights,
    bias,
    out,
    C,
    W: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
):
    """One program: some channels of one row. The window moves on by one token.

    A thread has whole channels, so it reads each place of a window before it writes there.

    Args:
        WHOLE: A channel's window is one number of `whole_windows`, its last token on top.
    """
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    source = tl.load(reads + row) * C + c
    target = tl.load(writes + row) * C + c
    x = tl.load(mixed + row * mixed_stride + c, mask=there, other=0.0)
    weight = tl.load(weights + c * SEEN + SEEN - 1, mask=there, other=0.0)
    total = x.to(tl.float32) * weight.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    if WHOLE:
        window = tl.load(whole_windows + source, mask=there, other=0)
        for at in tl.static_range(W - SEEN + 1, W):
            before = (window >> (16 * at)).to(tl.int16).to(windows.dtype.element_ty, bitcast=True)
            weight = tl.load(weights + c * SEEN + at - (W - SEEN) - 1, mask=there, other=0.0)
            total += before.to(tl.float32) * weight.to(tl.float32)
        bits = x.to(windows.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int64)
        window = ((window >> 16) & 0xFFFFFFFFFFFF) | (bits << 48)
        tl.store(whole_windows + target, window, mask=there)
    else:
        for at in tl.static_range(1, W):
            before = tl.load(windows + source * W + at, mask=there, other=0.0)
            if at > W - SEEN:
                weight = tl.load(weights + c * SEEN + at - (W - SEEN) - 1, mask=there, other=0.0)
                total += before.to(tl.float32) * weight.to(tl.float32)
            tl.store(windows + target * W + at - 1, before, mask=there)
        tl.store(windows + target * W + W - 1, x.to(windows.dtype.element_ty), mask=there)
    if ACTIVATES:
        total = total * _sigmoid(total)
    tl.store(out + row * C + c, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=("reads",))
def convolve_runs(
    mixed,
    mixed_stride,
    windows,
    reads,
    weights,
    bias,
    out,
    num_tokens,
    C,
    W: tl.constexpr,
    SEEN: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATES: tl.constexpr,
):
    """One program: some channels at one token of a sequence of so many. Windows stay as they are.

    Where a sequence reads from no slot, it begins.
    """
    row = tl.program_id(1).to(tl.int64)
    sequence, token = row // num_tokens, row % num_tokens
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    slot = tl.load(reads + sequence)
    x = tl.load(mixed + row * mixed_stride + c, mask=there, other=0.0)
    weight = tl.load(weights + c * SEEN + SEEN - 1, mask=there, other=0.0)
    total = x.to(tl.float32) * weight.to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=there, other=0.0).to(tl.float32)
    for at in tl.static_range(W - SEEN + 1, W):
        # So many tokens earlier, here or in the window.
        ago = W - at
        channels_here = tl.where(token < ago, 0, C)
        here = tl.load(mixed + (row - ago) * mixed_stride + c, mask=c < channels_here, other=0.0)
        channels_old = tl.where((token < ago) & (slot >= 0), C, 0)
        old = tl.load(windows + (slot * C + c) * W + at + token, mask=c < channels_old, other=0.0)
        before = tl.where(c < channels_here, here.to(windows.dtype.element_ty), old)
        weight = tl.load(weights + c * SEEN + at - (W - SEEN) - 1, mask=there, other=0.0)
        total += before.to(tl.float32) * weight.to(tl.float32)
    if ACTIVATES:
        total = total * _sigmoid(total)
    tl.store(out + row * C + c, total.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=("reads", "writes"))
def move_windows(
    mixed,
    mixed_stride,
    windows,
    reads,
    writes,
    num_tokens,
    C,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program: some channels of one sequence. Its window moves on by so many tokens.

    A thread has whole channels, and reads each place of a window before it writes there.
    """
    sequence = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = c < C
    slot = tl.load(reads + sequence)
    source, target = slot * C + c, tl.load(writes + sequence) * C + c
    end = (sequence + 1) * num_tokens
    for at in tl.static_range(W):
        ago = W - at
        channels_here = tl.where(num_tokens < ago, 0, C)
        here = tl.load(mixed + (end - ago) * mixed_stride + c, mask=c < channels_here, other=0.0)
        channels_old = tl.where((num_tokens < ago) & (slot >= 0), C, 0)
        old = tl.load(windows + source * W + at + num_tokens, mask=c < channels_old, other=0.0)
        now = tl.where(c < channels_here, here.to(windows.dtype.element_ty), old)
        tl.store(windows + target * W + at, now, mask=there)


@triton.jit
def _scale_of(x, scale, CORRECTS: tl.constexpr):
    """What a query or key is multiplied by."""
    if CORRECTS:
        scale = scale / tl.sqrt(tl.sum(x * x, 0) + 1e-6)
    return scale


@triton.jit
def _gate(a, a_stride, b, b_stride, a_log, dt_bias, row, head, strength, CORRECTS: tl.constexpr):
    """The log gate and the strength of a row's token in one head."""
    bias = tl.load(dt_bias + head).to(tl.float32)
    step = _softplus(tl.load(a + row * a_stride + head).to(tl.float32) + bias)
    gate = -tl.exp(tl.load(a_log + head).to(tl.float32)) * step
    if CORRECTS:
        step = strength * _sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    return gate, step


@triton.jit
def _base_of(base, row, num_rows):
    """The slot of a row's base, or 0, and whether a row beside it has the same."""
    live = row < num_rows
    slot = tl.load(base + row, mask=live, other=0)
    before = tl.load(base + row - 1, mask=live & (row > 0), other=-1)
    after = tl.load(base + row + 1, mask=row + 1 < num_rows, other=-1)
    return slot, (slot == before) | (slot == after)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INPUTS)
def read_bases(
    mixed,
    states,
    base,
    out,
    num_rows,
    scale,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    CORRECTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: what some rows read with keys and queries from one head of states they share.

    Args:
        out: [2, T, H, V] float32, what keys read and what queries read. It is zeros for other rows.
            Without corrections nobody asks for what keys read.
    """
    head = tl.program_id(0)
    # First the queries of all these rows, then their keys.
    ASKED: tl.constexpr = 2 * BLOCK_T if CORRECTS else BLOCK_T
    index = tl.arange(0, ASKED)
    row = tl.program_id(1) * BLOCK_T + index % BLOCK_T
    is_key = index // BLOCK_T == 1
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    live = row < num_rows
    source = row.to(tl.int64) * (2 * G * K + H * V) + tl.where(is_key, K_AT, Q_AT)
    source += (head // (H // G)) * K
    x = tl.load(
        (mixed + source)[:, None] + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0
    ).to(tl.float32)
    if CORRECTS:
        length = tl.sqrt(tl.sum(x * x, 1) + 1e-6)
        x *= (tl.where(is_key, 1.0, scale) / length)[:, None]
    total = tl.zeros([ASKED, BLOCK_V], tl.float32)
    # Slot 0 is nobody's: rows that fill up a graph have it.
    slots, is_shared = _base_of(base, row, num_rows)
    slots = tl.where(is_shared, slots, 0)
    slot = tl.max(slots, 0)
    inside = (k < K)[:, None] & (v < V)[None, :]
    while slot > 0:
        mine = slots == slot
        place = states + (slot * H + head) * (K * V) + k[:, None] * V + v[None, :]
        s_KV = tl.load(place, mask=inside, other=0.0)
        total += tl.dot(tl.where(mine[:, None], x, 0.0), s_KV, input_precision=PRECISION)
        slots = tl.where(mine, 0, slots)
        slot = tl.max(slots, 0)
    plane = tl.where(is_key, 0, 1).to(tl.int64) * num_rows
    target = ((plane + row) * H + head) * V
    tl.store((out + target)[:, None] + v[None, :], total, mask=live[:, None] & (v < V)[None, :])


@triton.jit
def _updates(
    gates,
    numbers,
    page_N,
    n,
    num,
    head_H,
    k,
    v,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Keys, values and sums of gates of some updates of a list; zeros past its end.

    Args:
        head_H: Heads that have one key head.
    """
    each: tl.constexpr = H // G
    live = n < num
    block_N = (page_N * G + tl.min(head_H, 0) // each) * PAGE
    at_N = n % N
    sums_NH = tl.load(
        (gates + block_N // 4 + at_N * each)[:, None] + (head_H % each)[None, :],
        mask=live[:, None],
        other=0.0,
    )
    k_NK = tl.load(
        (numbers + (block_N + KEYS) // SIZE + at_N * K)[:, None] + k[None, :],
        mask=live[:, None] & (k < K)[None, :],
        other=0.0,
    )
    u_NHV = tl.load(
        (numbers + (block_N + VALUES) // SIZE + at_N * (each * V))[:, None, None]
        + ((head_H % each) * V)[None, :, None]
        + v[None, None, :],
        mask=live[:, None, None] & (v < V)[None, None, :],
        other=0.0,
    )
    return k_NK, u_NHV, sums_NH


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INPUTS)
def read_lists(
    mixed,
    a,
    a_stride,
    b,
    b_stride,
    a_log,
    dt_bias,
    skip,
    reads,
    gates,
    numbers,
    base,
    listed,
    pages,
    out,
    num_rows,
    scale,
    strength,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    CORRECTS: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: some heads of one row, which have one key head. It reads the row's list, and
    adds the token's update.

    It also reads a state that no row beside it has. What it reads of others is in `reads`, by
    `read_bases`. gates, numbers: the states' memory as float32 and as the type of lists, which
    takes SIZE bytes. PAGE: bytes of a page's part for one key head. KEYS, VALUES: where these begin
    in it.

    What waits for nothing is asked for first, and updates while those before are computed with.
    """
    first_head = tl.program_id(0) * BLOCK_H
    head_H = first_head + tl.arange(0, BLOCK_H)
    row = tl.program_id(1).to(tl.int64)
    each: tl.constexpr = H // G
    key_head = first_head // each
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    place_HV = head_H[:, None] * V + v[None, :]
    inside_HV = (v < V)[None, :]
    num = tl.load(listed + row).to(tl.int32)
    slot, is_shared = _base_of(base, row, num_rows)
    channels = mixed + row * (2 * G * K + H * V)
    queries = channels + Q_AT + key_head * K
    keys = channels + K_AT + key_head * K
    q_K = tl.load(queries + k, mask=k < K, other=0.0).to(tl.float32)
    k_K = tl.load(keys + k, mask=k < K, other=0.0).to(tl.float32)
    v_HV = tl.load(channels + V_AT + place_HV, mask=inside_HV, other=0.0).to(tl.float32)
    gate_H, beta_H = _gate(
        a, a_stride, b, b_stride, a_log, dt_bias, row, head_H, strength, CORRECTS
    )
    last = tl.maximum(num - 1, 0)
    last_page = tl.load(pages + (last // N) * num_rows + row)
    new_page = tl.load(pages + (num // N) * num_rows + row)
    page_N = tl.load(pages + (n // N) * num_rows + row, mask=n < num, other=0)
    last_block = (last_page * G + key_head) * PAGE
    sum_H = tl.load(gates + last_block // 4 + (last % N) * each + head_H % each)
    next_k, next_u, next_sums = _updates(
        gates, numbers, page_N, n, num, head_H, k, v, G, H, K, V, N, PAGE, KEYS, VALUES, SIZE
    )
    ahead = n + BLOCK_N
    page_N = tl.load(pages + (ahead // N) * num_rows + row, mask=ahead < num, other=0)
    q_scale = _scale_of(q_K, scale, CORRECTS)
    k_scale = _scale_of(k_K, 1.0, CORRECTS)
    q_K *= q_scale
    k_K *= k_scale
    total_H = gate_H + tl.where(num > 0, sum_H, 0.0)
    # Summed up at the end, because threads have to wait for each other to do so.
    by_q_NHV = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_V], tl.float32)
    by_k_NHV = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, num, BLOCK_N):
        k_NK, u_NHV, sums_NH = next_k.to(tl.float32), next_u.to(tl.float32), next_sums
        ahead = start + BLOCK_N + n
        next_k, next_u, next_sums = _updates(
            gates,
            numbers,
            page_N,
            ahead,
            num,
            head_H,
            k,
            v,
            G,
            H,
            K,
            V,
            N,
            PAGE,
            KEYS,
            VALUES,
            SIZE,
        )
        ahead += BLOCK_N
        page_N = tl.load(pages + (ahead // N) * num_rows + row, mask=ahead < num, other=0)
        weight_NH = tl.where((start + n < num)[:, None], tl.exp(total_H[None, :] - sums_NH), 0.0)
        by_q_NH = weight_NH * tl.sum(k_NK * q_K[None, :], 1)[:, None]
        by_q_NHV += by_q_NH[:, :, None] * u_NHV
        if CORRECTS:
            by_k_NH = weight_NH * tl.sum(k_NK * k_K[None, :], 1)[:, None]
            by_k_NHV += by_k_NH[:, :, None] * u_NHV
    decay_H = tl.exp(total_H)
    own = tl.where(is_shared, 0, slot)
    if own > 0:
        state_HV = gates + (own * H + head_H)[:, None] * (K * V) + v[None, :]
        for start in range(0, K, 2 * BLOCK_N):
            first = start + n
            second = first + BLOCK_N
            first_NHV = tl.load(
                state_HV[None, :, :] + first[:, None, None] * V,
                mask=(first < K)[:, None, None] & inside_HV[None, :, :],
                other=0.0,
            )
            second_NHV = tl.load(
                state_HV[None, :, :] + second[:, None, None] * V,
                mask=(second < K)[:, None, None] & inside_HV[None, :, :],
                other=0.0,
            )
            first_q = tl.load(queries + first, mask=first < K, other=0.0).to(tl.float32)
            second_q = tl.load(queries + second, mask=second < K, other=0.0).to(tl.float32)
            by_q_H = q_scale * decay_H
            by_q_NHV += (first_q[:, None] * by_q_H[None, :])[:, :, None] * first_NHV
            by_q_NHV += (second_q[:, None] * by_q_H[None, :])[:, :, None] * second_NHV
            if CORRECTS:
                first_k = tl.load(keys + first, mask=first < K, other=0.0).to(tl.float32)
                second_k = tl.load(keys + second, mask=second < K, other=0.0).to(tl.float32)
                by_k_H = k_scale * decay_H
                by_k_NHV += (first_k[:, None] * by_k_H[None, :])[:, :, None] * first_NHV
                by_k_NHV += (second_k[:, None] * by_k_H[None, :])[:, :, None] * second_NHV
    read = reads + row * (H * V) + place_HV
    u_HV = beta_H[:, None] * v_HV
    if CORRECTS:
        by_k_HV = decay_H[:, None] * tl.load(read, mask=inside_HV, other=0.0)
        u_HV = beta_H[:, None] * (v_HV - by_k_HV - tl.sum(by_k_NHV, 0))
    read += num_rows.to(tl.int64) * (H * V)
    by_q_HV = decay_H[:, None] * tl.load(read, mask=inside_HV, other=0.0) + tl.sum(by_q_NHV, 0)
    by_q_HV += tl.sum(k_K * q_K, 0) * u_HV
    if not CORRECTS:
        by_q_HV += tl.load(skip + head_H).to(tl.float32)[:, None] * v_HV
    target = out + row * (H * V) + place_HV
    tl.store(target, by_q_HV.to(out.dtype.element_ty), mask=inside_HV)
    new_block = (new_page * G + key_head) * PAGE
    tl.store(gates + new_block // 4 + (num % N) * each + head_H % each, total_H)
    kind = numbers.dtype.element_ty
    new_u = numbers + (new_block + VALUES) // SIZE + (num % N) * (each * V)
    new_u += (head_H % each)[:, None] * V + v[None, :]
    tl.store(new_u, u_HV.to(kind), mask=inside_HV)
    if first_head % each == 0:
        new_k = numbers + (new_block + KEYS) // SIZE + (num % N) * K + k
        tl.store(new_k, k_K.to(kind), mask=k < K)


@triton.jit(do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=("reads", "writes"))
def step_states(
    mixed,
    a,
    a_stride,
    b,
    b_stride,
    a_log,
    dt_bias,
    skip,
    states,
    reads,
    writes,
    out,
    num_tokens,
    scale,
    strength,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    Q_AT: tl.constexpr,
    K_AT: tl.constexpr,
    V_AT: tl.constexpr,
    CORRECTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One program: a part of one head of one sequence, whose state goes from one slot to another.

    A sequence has so many tokens, one after another. Where it reads from no slot, it begins.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_at = (head // (H // G)) * K + k
    inside = (k < K)[:, None] & (v < V)[None, :]
    place = k[:, None] * V + v[None, :]
    slot = tl.load(reads + sequence)
    source = states + (slot * H + head) * (K * V)
    target = states + (tl.load(writes + sequence) * H + head) * (K * V)
    known = tl.where(slot < 0, 0, K)
    s_KV = tl.load(source + place, mask=inside & (k < known)[:, None], other=0.0)
    for token in range(num_tokens):
        row = sequence * num_tokens + token
        at = mixed + row * (2 * G * K + H * V)
        q_K = tl.load(at + Q_AT + key_at, mask=k < K, other=0.0).to(tl.float32)
        k_K = tl.load(at + K_AT + key_at, mask=k < K, other=0.0).to(tl.float32)
        q_K *= _scale_of(q_K, scale, CORRECTS)
        k_K *= _scale_of(k_K, 1.0, CORRECTS)
        v_V = tl.load(at + V_AT + head * V + v, mask=v < V, other=0.0).to(tl.float32)
        gate, beta = _gate(a, a_stride, b, b_stride, a_log, dt_bias, row, head, strength, CORRECTS)
        s_KV *= tl.exp(gate)
        u_V = beta * v_V
        if CORRECTS:
            u_V = beta * (v_V - tl.sum(s_KV * k_K[:, None], 0))
        s_KV += k_K[:, None] * u_V[None, :]
        read_V = tl.sum(s_KV * q_K[:, None], 0)
        if not CORRECTS:
            read_V += tl.load(skip + head).to(tl.float32) * v_V
        tl.store(out + (row * H + head) * V + v, read_V.to(out.dtype.element_ty), mask=v < V)
    tl.store(target + place, s_KV, mask=inside)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=INPUTS)
def fold_lists(
    states,
    gates,
    numbers,
    base,
    target,
    listed,
    pages,
    num_rows,
    G: tl.constexpr,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    N: tl.constexpr,
    PAGE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
):
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
        page_N = tl.load(pages + (n // N) * num_rows + row, mask=n < num, other=0)
        k_NK, u_N1V, sums_N1 = _updates(
            gates,
            numbers,
            page_N,
            n,
            num,
            head + tl.arange(0, 1),
            k,
            v,
            G,
            H,
            K,
            V,
            N,
            PAGE,
            KEYS,
            VALUES,
            SIZE,
        )
        weight_N1 = tl.where((n < num)[:, None], tl.exp(total - sums_N1), 0.0)
        u_NV = tl.reshape(u_N1V, [BLOCK_N, BLOCK_V]).to(tl.float32) * weight_N1
        k_KN = tl.trans(k_NK.to(tl.float32))
        s_KV += tl.dot(k_KN, u_NV, input_precision=PRECISION)
    target_at = states + (tl.load(target + row) * H + head) * (K * V)
    tl.store(target_at + place, s_KV, mask=inside)
