"""Triton kernels of the gated delta rule and of Mamba2, one token at a time.

Legend: T rows, S sequences, H value heads, G key heads, K key dim, V value dim, C channels, W width
of a window, P pages of an update list, N updates of a page, F update lists. Strides are in
elements. CORRECTS: the rule is the delta rule, which corrects values by what keys read, and whose
queries and keys have unit length. Without it (Mamba2), `skip` times a token's own value is added.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The number of rows determines where these begin. Without this list, Triton would compile a kernel
# for each alignment.
INPUTS = ("base", "target", "listed", "pages")
COUNTS = ("num_rows",)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x):
    return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))


@triton.jit
def _weigh(x, weights, mask):
    """Return inputs times their weights in float32."""
    return x.to(tl.float32) * tl.load(weights, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize_on_alignment=("read_slots", "write_slots"))
def convolve(
    mixed,
    mixed_stride,
    windows,
    whole_windows,
    read_slots,
    write_slots,
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
    """Compute the convolution at one token per row, and shift windows by that token.

    One program computes some channels of one row. A thread has whole channels, so it reads each
    entry of a window before it overwrites it.

    Args:
        mixed: Pointer to the inputs [T, C].
        mixed_stride: Stride of `mixed` between rows.
        windows: Pointer to the windows [slots, C, W].
        whole_windows: Pointer to the same windows as 64-bit integers [slots, C].
        read_slots: Pointer to the slot of each row's window before the token [T].
        write_slots: Pointer to the slot for each row's window after the token [T].
        weights: Pointer to the weights [C, SEEN].
        bias: Pointer to the bias [C].
        out: Pointer to the results [T, C].
        C: Channels.
        W: Tokens of a window.
        SEEN: Tokens that the convolution sees, at most W.
        BLOCK: Channels per program.
        WHOLE: Whether to read and write a channel's window as one 64-bit integer of
            `whole_windows`, with its last token in the highest bits.
        HAS_BIAS: Whether there is a bias.
        ACTIVATES: Whether SiLU is applied to the result.
    """
    row = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = c < C
    source = tl.load(read_slots + row) * C + c
    target = tl.load(write_slots + row) * C + c
    x = tl.load(mixed + row * mixed_stride + c, mask=in_bounds, other=0.0)
    total = _weigh(x, weights + c * SEEN + SEEN - 1, in_bounds)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=in_bounds, other=0.0).to(tl.float32)
    if WHOLE:
        window = tl.load(whole_windows + source, mask=in_bounds, other=0)
        for at in tl.static_range(W - SEEN + 1, W):
            before = (window >> (16 * at)).to(tl.int16).to(windows.dtype.element_ty, bitcast=True)
            total += _weigh(before, weights + c * SEEN + at - (W - SEEN) - 1, in_bounds)
        bits = x.to(windows.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int64)
        window = ((window >> 16) & 0xFFFFFFFFFFFF) | (bits << 48)
        tl.store(whole_windows + target, window, mask=in_bounds)
    else:
        for at in tl.static_range(1, W):
            before = tl.load(windows + source * W + at, mask=in_bounds, other=0.0)
            if at > W - SEEN:
                total += _weigh(before, weights + c * SEEN + at - (W - SEEN) - 1, in_bounds)
            tl.store(windows + target * W + at - 1, before, mask=in_bounds)
        tl.store(windows + target * W + W - 1, x.to(windows.dtype.element_ty), mask=in_bounds)
    if ACTIVATES:
        total = total * _sigmoid(total)
    tl.store(out + row * C + c, total.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit(do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=("read_slots",))
def convolve_runs(
    mixed,
    mixed_stride,
    windows,
    read_slots,
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
    """Compute the convolution at `num_tokens` tokens of each sequence, without changing windows.

    One program computes some channels of one token.

    Args:
        mixed: Pointer to the inputs [T, C].
        mixed_stride: Stride of `mixed` between rows.
        windows: Pointer to the windows [slots, C, W].
        read_slots: Pointer to the slot of each sequence's window before its first token [S]; -1 at
            the start of a text.
        weights: Pointer to the weights [C, SEEN].
        bias: Pointer to the bias [C].
        out: Pointer to the results [T, C].
        num_tokens: Tokens per sequence.
        C: Channels.
        W: Tokens of a window.
        SEEN: Tokens that the convolution sees, at most W.
        BLOCK: Channels per program.
        HAS_BIAS: Whether there is a bias.
        ACTIVATES: Whether SiLU is applied to the result.
    """
    row = tl.program_id(1).to(tl.int64)
    sequence, token = row // num_tokens, row % num_tokens
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = c < C
    slot = tl.load(read_slots + sequence)
    x = tl.load(mixed + row * mixed_stride + c, mask=in_bounds, other=0.0)
    total = _weigh(x, weights + c * SEEN + SEEN - 1, in_bounds)
    if HAS_BIAS:
        total += tl.load(bias + c, mask=in_bounds, other=0.0).to(tl.float32)
    for at in tl.static_range(W - SEEN + 1, W):
        # The input `ago` tokens earlier is in this call's inputs or in the window.
        ago = W - at
        channels_here = tl.where(token < ago, 0, C)
        here = tl.load(mixed + (row - ago) * mixed_stride + c, mask=c < channels_here, other=0.0)
        channels_old = tl.where((token < ago) & (slot >= 0), C, 0)
        old = tl.load(windows + (slot * C + c) * W + at + token, mask=c < channels_old, other=0.0)
        before = tl.where(c < channels_here, here.to(windows.dtype.element_ty), old)
        total += _weigh(before, weights + c * SEEN + at - (W - SEEN) - 1, in_bounds)
    if ACTIVATES:
        total = total * _sigmoid(total)
    tl.store(out + row * C + c, total.to(out.dtype.element_ty), mask=in_bounds)


@triton.jit(
    do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=("read_slots", "write_slots")
)
def move_windows(
    mixed,
    mixed_stride,
    windows,
    read_slots,
    write_slots,
    num_tokens,
    C,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Shift windows by the tokens of a call; one program per block of channels and sequence.

    A thread has whole channels, and reads each entry of a window before it overwrites it.

    Args:
        mixed: Pointer to the inputs [T, C].
        mixed_stride: Stride of `mixed` between rows.
        windows: Pointer to the windows [slots, C, W].
        read_slots: Pointer to the slot of each sequence's window before its first token [S]; -1 at
            the start of a text.
        write_slots: Pointer to the slot for each sequence's window after its last token [S].
        num_tokens: Tokens per sequence.
        C: Channels.
        W: Tokens of a window.
        BLOCK: Channels per program.
    """
    sequence = tl.program_id(1).to(tl.int64)
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_bounds = c < C
    slot = tl.load(read_slots + sequence)
    source, target = slot * C + c, tl.load(write_slots + sequence) * C + c
    end = (sequence + 1) * num_tokens
    for at in tl.static_range(W):
        ago = W - at
        channels_here = tl.where(num_tokens < ago, 0, C)
        here = tl.load(mixed + (end - ago) * mixed_stride + c, mask=c < channels_here, other=0.0)
        channels_old = tl.where((num_tokens < ago) & (slot >= 0), C, 0)
        old = tl.load(windows + source * W + at + num_tokens, mask=c < channels_old, other=0.0)
        now = tl.where(c < channels_here, here.to(windows.dtype.element_ty), old)
        tl.store(windows + target * W + at, now, mask=in_bounds)


@triton.jit
def _scale_of(x, scale, CORRECTS: tl.constexpr):
    """Return the factor of a query or key."""
    if CORRECTS:
        scale = scale / tl.sqrt(tl.sum(x * x, 0) + 1e-6)
    return scale


@triton.jit
def _gate(a, a_stride, b, b_stride, a_log, dt_bias, row, head, strength, CORRECTS: tl.constexpr):
    """Return the log gate and the strength of a row's token, per head."""
    bias = tl.load(dt_bias + head).to(tl.float32)
    step = _softplus(tl.load(a + row * a_stride + head).to(tl.float32) + bias)
    gate = -tl.exp(tl.load(a_log + head).to(tl.float32)) * step
    if CORRECTS:
        step = strength * _sigmoid(tl.load(b + row * b_stride + head).to(tl.float32))
    return gate, step


@triton.jit
def _base_of(base, row, num_rows):
    """Return the slot of a row's base state, or 0, and whether an adjacent row has the same."""
    mask = row < num_rows
    slot = tl.load(base + row, mask=mask, other=0)
    before = tl.load(base + row - 1, mask=mask & (row > 0), other=-1)
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
    """Read shared base states with the keys and queries of rows.

    One program computes some rows and some columns of one head.

    Args:
        mixed: Pointer to queries, keys and values after the convolution [T, 2 G K + H V].
        states: Pointer to the states [slots, H, K, V], float32.
        base: Pointer to the slot of each row's base state [T].
        out: Pointer to what keys read and what queries read [2, T, H, V], float32. Zeros for rows
            that share no base. What keys read is not used, nor computed, without CORRECTS.
        num_rows: T, the number of rows.
        scale: Factor of normalized queries.
        G: Key heads.
        H: Value heads.
        K: Key dimension.
        V: Value dimension.
        Q_AT: First channel of queries.
        K_AT: First channel of keys.
        V_AT: First channel of values.
        CORRECTS: Whether the rule is the delta rule.
        BLOCK_T: Rows per program.
        BLOCK_K: K, rounded up to a power of two.
        BLOCK_V: Columns per program.
        PRECISION: Input precision of products.
    """
    head = tl.program_id(0)
    # Vectors that read states: the queries of all these rows, then their keys.
    NUM_VECTORS: tl.constexpr = 2 * BLOCK_T if CORRECTS else BLOCK_T
    index = tl.arange(0, NUM_VECTORS)
    row = tl.program_id(1) * BLOCK_T + index % BLOCK_T
    is_key = index // BLOCK_T == 1
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    k = tl.arange(0, BLOCK_K)
    mask = row < num_rows
    source = row.to(tl.int64) * (2 * G * K + H * V) + tl.where(is_key, K_AT, Q_AT)
    source += (head // (H // G)) * K
    x = tl.load(
        (mixed + source)[:, None] + k[None, :], mask=mask[:, None] & (k < K)[None, :], other=0.0
    ).to(tl.float32)
    if CORRECTS:
        length = tl.sqrt(tl.sum(x * x, 1) + 1e-6)
        x *= (tl.where(is_key, 1.0, scale) / length)[:, None]
    total = tl.zeros([NUM_VECTORS, BLOCK_V], tl.float32)
    # Slot 0 holds no state. Padding rows of a CUDA graph have it.
    slots, is_shared = _base_of(base, row, num_rows)
    slots = tl.where(is_shared, slots, 0)
    slot = tl.max(slots, 0)
    inside = (k < K)[:, None] & (v < V)[None, :]
    while slot > 0:
        reads_slot = slots == slot
        offsets = states + (slot * H + head) * (K * V) + k[:, None] * V + v[None, :]
        s_KV = tl.load(offsets, mask=inside, other=0.0)
        total += tl.dot(tl.where(reads_slot[:, None], x, 0.0), s_KV, input_precision=PRECISION)
        slots = tl.where(reads_slot, 0, slots)
        slot = tl.max(slots, 0)
    plane = tl.where(is_key, 0, 1).to(tl.int64) * num_rows
    target = ((plane + row) * H + head) * V
    tl.store((out + target)[:, None] + v[None, :], total, mask=mask[:, None] & (v < V)[None, :])


@triton.jit
def _updates(gates, numbers, page_N, n, num, head_H, k, v, layout):
    """Load keys, values and sums of gates of some updates of a list, with zeros past its end.

    Args:
        gates: Pointer to the memory of states as float32.
        numbers: Pointer to the same memory in the type of keys and values.
        page_N: Page of each update.
        n: Index of each update in the list.
        num: Number of updates in the list.
        head_H: Value heads, which share one key head.
        k: Key numbers to load.
        v: Value numbers to load.
        layout: The constants G, H, K, V, N, PAGE, KEYS, VALUES and SIZE of the kernel.
    """
    G, H, K, V, N, PAGE, KEYS, VALUES, SIZE = layout
    per_group: tl.constexpr = H // G
    mask = n < num
    block_N = (page_N * G + tl.min(head_H, 0) // per_group) * PAGE
    at_N = n % N
    sums_NH = tl.load(
        (gates + block_N // 4 + at_N * per_group)[:, None] + (head_H % per_group)[None, :],
        mask=mask[:, None],
        other=0.0,
    )
    k_NK = tl.load(
        (numbers + (block_N + KEYS) // SIZE + at_N * K)[:, None] + k[None, :],
        mask=mask[:, None] & (k < K)[None, :],
        other=0.0,
    )
    u_NHV = tl.load(
        (numbers + (block_N + VALUES) // SIZE + at_N * (per_group * V))[:, None, None]
        + ((head_H % per_group) * V)[None, :, None]
        + v[None, None, :],
        mask=mask[:, None, None] & (v < V)[None, None, :],
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
    base_reads,
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
    """Read the update lists of rows, and append each token's update.

    One program computes some value heads, of one key head, of one row. It also reads the row's base
    state if no adjacent row shares it; `read_bases` has read shared states into `base_reads`. Loads
    that depend on no other load come first, and updates are loaded while the previous ones are
    used.

    Args:
        mixed: Pointer to queries, keys and values after the convolution [T, 2 G K + H V].
        a: Pointer to the inputs of gates [T, H].
        a_stride: Stride of `a` between rows.
        b: Pointer to the inputs of strengths [T, H].
        b_stride: Stride of `b` between rows.
        a_log: Pointer to weights of gates [H].
        dt_bias: Pointer to biases of gates [H].
        skip: Pointer to Mamba2's weights of a token's own value [H].
        base_reads: Pointer to what keys and queries read from shared states [2, T, H, V], float32.
        gates: Pointer to the memory of states as float32.
        numbers: Pointer to the same memory in the type of keys and values.
        base: Pointer to the slot of each row's base state [T].
        listed: Pointer to the number of updates in each list [T].
        pages: Pointer to the pages of each list [P, T].
        out: Pointer to the results [T, H, V].
        num_rows: T, the number of rows.
        scale: Factor of queries.
        strength: Upper bound of strengths.
        G: Key heads.
        H: Value heads.
        K: Key dimension.
        V: Value dimension.
        Q_AT: First channel of queries.
        K_AT: First channel of keys.
        V_AT: First channel of values.
        CORRECTS: Whether the rule is the delta rule.
        N: Updates per page.
        PAGE: Bytes of a page's part of one key head.
        KEYS: Byte offset of keys in this part.
        VALUES: Byte offset of values in this part.
        SIZE: Bytes of a number of keys and values.
        BLOCK_H: Value heads per program.
        BLOCK_N: Updates read at once.
        BLOCK_K: K, rounded up to a power of two.
        BLOCK_V: V, rounded up to a power of two.
    """
    first_head = tl.program_id(0) * BLOCK_H
    head_H = first_head + tl.arange(0, BLOCK_H)
    row = tl.program_id(1).to(tl.int64)
    per_group: tl.constexpr = H // G
    key_head = first_head // per_group
    k = tl.arange(0, BLOCK_K)
    v = tl.arange(0, BLOCK_V)
    n = tl.arange(0, BLOCK_N)
    offset_HV = head_H[:, None] * V + v[None, :]
    inside_HV = (v < V)[None, :]
    num = tl.load(listed + row).to(tl.int32)
    slot, is_shared = _base_of(base, row, num_rows)
    channels = mixed + row * (2 * G * K + H * V)
    queries = channels + Q_AT + key_head * K
    keys = channels + K_AT + key_head * K
    q_K = tl.load(queries + k, mask=k < K, other=0.0).to(tl.float32)
    k_K = tl.load(keys + k, mask=k < K, other=0.0).to(tl.float32)
    v_HV = tl.load(channels + V_AT + offset_HV, mask=inside_HV, other=0.0).to(tl.float32)
    gate_H, beta_H = _gate(
        a, a_stride, b, b_stride, a_log, dt_bias, row, head_H, strength, CORRECTS
    )
    last = tl.maximum(num - 1, 0)
    last_page = tl.load(pages + (last // N) * num_rows + row)
    new_page = tl.load(pages + (num // N) * num_rows + row)
    page_N = tl.load(pages + (n // N) * num_rows + row, mask=n < num, other=0)
    last_block = (last_page * G + key_head) * PAGE
    sum_H = tl.load(gates + last_block // 4 + (last % N) * per_group + head_H % per_group)
    layout = G, H, K, V, N, PAGE, KEYS, VALUES, SIZE
    next_k, next_u, next_sums = _updates(gates, numbers, page_N, n, num, head_H, k, v, layout)
    ahead = n + BLOCK_N
    page_N = tl.load(pages + (ahead // N) * num_rows + row, mask=ahead < num, other=0)
    q_scale = _scale_of(q_K, scale, CORRECTS)
    k_scale = _scale_of(k_K, 1.0, CORRECTS)
    q_K *= q_scale
    k_K *= k_scale
    total_H = gate_H + tl.where(num > 0, sum_H, 0.0)
    # These are reduced at the end, because threads must wait for each other in a reduction.
    by_q_NHV = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_V], tl.float32)
    by_k_NHV = tl.zeros([BLOCK_N, BLOCK_H, BLOCK_V], tl.float32)
    for start in range(0, num, BLOCK_N):
        k_NK, u_NHV, sums_NH = next_k.to(tl.float32), next_u.to(tl.float32), next_sums
        ahead = start + BLOCK_N + n
        next_k, next_u, next_sums = _updates(
            gates, numbers, page_N, ahead, num, head_H, k, v, layout
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
    read = base_reads + row * (H * V) + offset_HV
    u_HV = beta_H[:, None] * v_HV
    if CORRECTS:
        by_k_HV = decay_H[:, None] * tl.load(read, mask=inside_HV, other=0.0)
        u_HV = beta_H[:, None] * (v_HV - by_k_HV - tl.sum(by_k_NHV, 0))
    read += num_rows.to(tl.int64) * (H * V)
    by_q_HV = decay_H[:, None] * tl.load(read, mask=inside_HV, other=0.0) + tl.sum(by_q_NHV, 0)
    by_q_HV += tl.sum(k_K * q_K, 0) * u_HV
    if not CORRECTS:
        by_q_HV += tl.load(skip + head_H).to(tl.float32)[:, None] * v_HV
    target = out + row * (H * V) + offset_HV
    tl.store(target, by_q_HV.to(out.dtype.element_ty), mask=inside_HV)
    new_block = (new_page * G + key_head) * PAGE
    tl.store(gates + new_block // 4 + (num % N) * per_group + head_H % per_group, total_H)
    kind = numbers.dtype.element_ty
    new_u = numbers + (new_block + VALUES) // SIZE + (num % N) * (per_group * V)
    new_u += (head_H % per_group)[:, None] * V + v[None, :]
    tl.store(new_u, u_HV.to(kind), mask=inside_HV)
    if first_head % per_group == 0:
        new_k = numbers + (new_block + KEYS) // SIZE + (num % N) * K + k
        tl.store(new_k, k_K.to(kind), mask=k < K)


@triton.jit(
    do_not_specialize=("num_tokens",), do_not_specialize_on_alignment=("read_slots", "write_slots")
)
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
    read_slots,
    write_slots,
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
    """Update the states of sequences by `num_tokens` tokens each, one after another.

    One program computes some columns of one head of one sequence.

    Args:
        mixed: Pointer to queries, keys and values after the convolution [T, 2 G K + H V].
        a: Pointer to the inputs of gates [T, H].
        a_stride: Stride of `a` between rows.
        b: Pointer to the inputs of strengths [T, H].
        b_stride: Stride of `b` between rows.
        a_log: Pointer to weights of gates [H].
        dt_bias: Pointer to biases of gates [H].
        skip: Pointer to Mamba2's weights of a token's own value [H].
        states: Pointer to the states [slots, H, K, V], float32.
        read_slots: Pointer to the slot of each sequence's state before its first token [S]; -1 at
            the start of a text.
        write_slots: Pointer to the slot for each sequence's state after its last token [S].
        out: Pointer to the results [T, H, V].
        num_tokens: Tokens per sequence.
        scale: Factor of queries.
        strength: Upper bound of strengths.
        G: Key heads.
        H: Value heads.
        K: Key dimension.
        V: Value dimension.
        Q_AT: First channel of queries.
        K_AT: First channel of keys.
        V_AT: First channel of values.
        CORRECTS: Whether the rule is the delta rule.
        BLOCK_K: K, rounded up to a power of two.
        BLOCK_V: Columns per program.
    """
    head = tl.program_id(0)
    sequence = tl.program_id(1).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    key_at = (head // (H // G)) * K + k
    inside = (k < K)[:, None] & (v < V)[None, :]
    offsets = k[:, None] * V + v[None, :]
    slot = tl.load(read_slots + sequence)
    source = states + (slot * H + head) * (K * V)
    target = states + (tl.load(write_slots + sequence) * H + head) * (K * V)
    known = tl.where(slot < 0, 0, K)
    s_KV = tl.load(source + offsets, mask=inside & (k < known)[:, None], other=0.0)
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
    tl.store(target + offsets, s_KV, mask=inside)


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
    """Fold update lists into states; one program per list, head and block of columns.

    Args:
        states: Pointer to the states [slots, H, K, V], float32.
        gates: Pointer to the memory of states as float32.
        numbers: Pointer to the same memory in the type of keys and values.
        base: Pointer to the slot of the state to which each list applies [F].
        target: Pointer to the slot for each resulting state [F].
        listed: Pointer to the number of updates in each list [F].
        pages: Pointer to the pages of each list [P, F].
        num_rows: F, the number of lists.
        G: Key heads.
        H: Value heads.
        K: Key dimension.
        V: Value dimension.
        N: Updates per page.
        PAGE: Bytes of a page's part of one key head.
        KEYS: Byte offset of keys in this part.
        VALUES: Byte offset of values in this part.
        SIZE: Bytes of a number of keys and values.
        BLOCK_N: Updates folded at once.
        BLOCK_K: K, rounded up to a power of two.
        BLOCK_V: Columns per program.
        PRECISION: Input precision of products.
    """
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    per_group: tl.constexpr = H // G
    key_head = head // per_group
    k = tl.arange(0, BLOCK_K)
    v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    num = tl.load(listed + row).to(tl.int32)
    last = tl.maximum(num - 1, 0)
    page = tl.load(pages + (last // N) * num_rows + row)
    block = (page * G + key_head) * PAGE
    total = tl.load(gates + block // 4 + (last % N) * per_group + head % per_group)
    total = tl.where(num > 0, total, 0.0)
    inside = (k < K)[:, None] & (v < V)[None, :]
    offsets = k[:, None] * V + v[None, :]
    source = states + (tl.load(base + row) * H + head) * (K * V)
    s_KV = tl.load(source + offsets, mask=inside, other=0.0) * tl.exp(total)
    layout = G, H, K, V, N, PAGE, KEYS, VALUES, SIZE
    for start in range(0, num, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        page_N = tl.load(pages + (n // N) * num_rows + row, mask=n < num, other=0)
        head_1 = head + tl.arange(0, 1)
        k_NK, u_N1V, sums_N1 = _updates(gates, numbers, page_N, n, num, head_1, k, v, layout)
        weight_N1 = tl.where((n < num)[:, None], tl.exp(total - sums_N1), 0.0)
        u_NV = tl.reshape(u_N1V, [BLOCK_N, BLOCK_V]).to(tl.float32) * weight_N1
        k_KN = tl.trans(k_NK.to(tl.float32))
        s_KV += tl.dot(k_KN, u_NV, input_precision=PRECISION)
    target_at = states + (tl.load(target + row) * H + head) * (K * V)
    tl.store(target_at + offsets, s_KV, mask=inside)
