"""Triton kernels of attention with gradients over packed trees.

The key of a token is seen by the tokens of its subtree, which are consecutive: from the token
itself to its stop. A program goes over those blocks of scores that have a visible pair; where each
row sees each key, it needs no mask. Scores exist in registers only: the backward pass computes them
again, once for the gradients of queries and once for those of keys and values. No sum depends on
the order in which programs run.

Tensors are contiguous, with heads first: [heads, T, width].

Legend: T tokens, M rows and N keys of a block, K key dimension, V value dimension.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treegen.ops.attention.gpu.kernel_steps import LOG2E


@triton.jit
def load_rows(x, head, row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows of one head [rows, BLOCK], with 0 for padding.

    Args:
        x: Pointer to the tensor [heads, T, WIDTH].
        head: The head.
        row: The numbers of the rows.
        num_rows: T.
        WIDTH: Numbers of a row.
        BLOCK: Width of the block that holds them.
    """
    column = tl.arange(0, BLOCK)
    at = head.to(tl.int64) * num_rows + row
    is_inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    return tl.load(x + at[:, None] * WIDTH + column[None, :], mask=is_inside, other=0.0)


@triton.jit
def store_rows(values, x, head, row, num_rows, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store rows of one head [rows, BLOCK].

    Args:
        values: The rows.
        x: Pointer to the tensor [heads, T, WIDTH].
        head: The head.
        row: The numbers of the rows.
        num_rows: T.
        WIDTH: Numbers of a row.
        BLOCK: Width of the block that holds them.
    """
    column = tl.arange(0, BLOCK)
    at = head.to(tl.int64) * num_rows + row
    is_inside = (row < num_rows)[:, None] & (column < WIDTH)[None, :]
    values = values.to(x.dtype.element_ty)
    tl.store(x + at[:, None] * WIDTH + column[None, :], values, mask=is_inside)


@triton.jit
def product(a, b):
    """Return a matrix product in float32, of float32 numbers without rounding them to TF32."""
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def logits_of(products, scale, softcap, HAS_CAP: tl.constexpr):
    """Return logits in base 2, and the slopes of their soft cap.

    Args:
        products: Products of queries and keys.
        scale: Their factor.
        softcap: Limit of the size of logits.
        HAS_CAP: Whether there is a soft cap.
    """
    if HAS_CAP:
        # tanh through exp, which does not overflow for large arguments of either sign.
        bend = tl.exp2(tl.abs(products) * (-2 * LOG2E * scale / softcap))
        tanh = tl.where(products < 0, -1.0, 1.0) * ((1 - bend) / (1 + bend))
        return tanh * (softcap * LOG2E), 1 - tanh * tanh
    return products * (scale * LOG2E), products


@triton.jit
def is_seen(row, key, tree, HAS_WINDOW: tl.constexpr):
    """Return which rows see which keys; both have a dimension of 1 where the other varies.

    Args:
        row: Rows.
        key: Keys.
        tree: Pointer to the stops of all tokens, then their positions; T; and the number of
            positions of the window or chunk.
        HAS_WINDOW: 0 for no window, 1 for the last positions, 2 for those of the row's chunk.
    """
    token_layout, num_rows, window = tree
    stop = tl.load(token_layout + key, mask=key < num_rows, other=0)
    seen = (key <= row) & (row < stop)
    if HAS_WINDOW:
        at = tl.load(token_layout + num_rows + row, mask=row < num_rows, other=0)
        key_at = tl.load(token_layout + num_rows + key, mask=key < num_rows, other=0)
        if HAS_WINDOW == 2:
            seen = seen & (key_at >= at - at % window)
        else:
            seen = seen & (key_at > at - window)
    return seen


@triton.jit
def attend_rows(
    q,
    k,
    v,
    sinks,
    out,
    lses,
    blocks,
    offsets,
    token_layout,
    num_rows,
    scale,
    softcap,
    window,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write the outputs and the natural LSEs of a block of rows of one query head.

    Args:
        q: Pointer to the queries.
        k: Pointer to the keys.
        v: Pointer to the values.
        sinks: Pointer to the sinks [H]; read only with HAS_SINKS.
        out: Pointer to the outputs.
        lses: Pointer to the LSEs [H, T].
        blocks: Pointer to the numbers of key blocks that a row block sees, row block by row block.
        offsets: Pointer to the ends of parts of `blocks`, after a 0. Each row block has two parts:
            first the key blocks that need no mask, then the others.
        token_layout: Stops and positions, as in `is_seen`.
        num_rows: T.
        scale: Factor of products.
        softcap: Limit of the size of logits.
        window: Number of positions of the window or chunk.
        R: Query heads per key head.
        K: Numbers of a key.
        V: Numbers of a value.
        BLOCK_K: Width of the block that holds a key.
        BLOCK_V: Width of the block that holds a value.
        BLOCK_M: Rows of a block.
        BLOCK_N: Keys of a block.
        HAS_WINDOW: Which window there is, as in `is_seen`.
        HAS_CAP: Whether there is a soft cap.
        HAS_SINKS: Whether there are sinks.
    """
    # The last rows see most keys, so they start first.
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    tree = token_layout, num_rows, window
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MK = load_rows(q, head, row, num_rows, K, BLOCK_K)
    # A finite number: the difference of two infinities would not be a number.
    top = tl.full([BLOCK_M], -1e30, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        top = tl.zeros([BLOCK_M], tl.float32) + tl.load(sinks + head).to(tl.float32) * LOG2E
        total += 1.0
    sum_MV = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for masked in tl.static_range(2):
        part = offsets + 2 * block + masked
        for at in range(tl.load(part), tl.load(part + 1)):
            key = tl.load(blocks + at) * BLOCK_N + tl.arange(0, BLOCK_N)
            k_NK = load_rows(k, head // R, key, num_rows, K, BLOCK_K)
            logit, _ = logits_of(product(q_MK, tl.trans(k_NK)), scale, softcap, HAS_CAP)
            if masked:
                seen = is_seen(row[:, None], key[None, :], tree, HAS_WINDOW)
                logit = tl.where(seen, logit, float("-inf"))
            new_top = tl.maximum(top, tl.max(logit, 1))
            weight = tl.exp2(logit - new_top[:, None])
            alpha = tl.exp2(top - new_top)
            v_NV = load_rows(v, head // R, key, num_rows, V, BLOCK_V)
            sum_MV = sum_MV * alpha[:, None] + product(weight.to(v_NV.dtype), v_NV)
            total = total * alpha + tl.sum(weight, 1)
            top = new_top
    total = tl.where(row < num_rows, total, 1.0)
    store_rows(sum_MV / total[:, None], out, head, row, num_rows, V, BLOCK_V)
    lse = (top + tl.log2(total)) / LOG2E
    tl.store(lses + head.to(tl.int64) * num_rows + row, lse, mask=row < num_rows)


@triton.jit
def differentiate_rows(
    q,
    k,
    v,
    out,
    grad,
    lses,
    dots,
    dq,
    blocks,
    offsets,
    token_layout,
    num_rows,
    scale,
    softcap,
    window,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """Write the gradients of a block of queries of one head.

    Args:
        q: Pointer to the queries.
        k: Pointer to the keys.
        v: Pointer to the values.
        out: Pointer to the outputs.
        grad: Pointer to the gradients of the outputs.
        lses: Pointer to the LSEs [H, T].
        dots: Pointer to the products of outputs and their gradients [H, T], to be filled.
        dq: Pointer to the gradients of the queries.
        blocks: Pointer to the numbers of key blocks that a row block sees, row block by row block.
        offsets: Pointer to the ends of parts of `blocks`, after a 0. Each row block has two parts:
            first the key blocks that need no mask, then the others.
        token_layout: Stops and positions, as in `is_seen`.
        num_rows: T.
        scale: Factor of products.
        softcap: Limit of the size of logits.
        window: Number of positions of the window or chunk.
        R: Query heads per key head.
        K: Numbers of a key.
        V: Numbers of a value.
        BLOCK_K: Width of the block that holds a key.
        BLOCK_V: Width of the block that holds a value.
        BLOCK_M: Rows of a block.
        BLOCK_N: Keys of a block.
        HAS_WINDOW: Which window there is, as in `is_seen`.
        HAS_CAP: Whether there is a soft cap.
    """
    block, head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    tree = token_layout, num_rows, window
    row = block * BLOCK_M + tl.arange(0, BLOCK_M)
    q_MK = load_rows(q, head, row, num_rows, K, BLOCK_K)
    grad_MV = load_rows(grad, head, row, num_rows, V, BLOCK_V)
    out_MV = load_rows(out, head, row, num_rows, V, BLOCK_V)
    dot = tl.sum(grad_MV.to(tl.float32) * out_MV.to(tl.float32), 1)
    at_row = head.to(tl.int64) * num_rows + row
    tl.store(dots + at_row, dot, mask=row < num_rows)
    lse = tl.load(lses + at_row, mask=row < num_rows, other=0.0) * LOG2E
    dq_MK = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for masked in tl.static_range(2):
        part = offsets + 2 * block + masked
        for at in range(tl.load(part), tl.load(part + 1)):
            key = tl.load(blocks + at) * BLOCK_N + tl.arange(0, BLOCK_N)
            k_NK = load_rows(k, head // R, key, num_rows, K, BLOCK_K)
            v_NV = load_rows(v, head // R, key, num_rows, V, BLOCK_V)
            logit, slope = logits_of(product(q_MK, tl.trans(k_NK)), scale, softcap, HAS_CAP)
            weight = tl.exp2(logit - lse[:, None])
            if masked:
                seen = is_seen(row[:, None], key[None, :], tree, HAS_WINDOW)
                weight = tl.where(seen, weight, 0.0)
            d_MN = weight * (product(grad_MV, tl.trans(v_NV)) - dot[:, None])
            if HAS_CAP:
                d_MN *= slope
            dq_MK += product(d_MN.to(k_NK.dtype), k_NK)
    store_rows(dq_MK * scale, dq, head, row, num_rows, K, BLOCK_K)


@triton.jit
def differentiate_keys(
    q,
    k,
    v,
    grad,
    lses,
    dots,
    dk,
    dv,
    blocks,
    offsets,
    token_layout,
    num_rows,
    scale,
    softcap,
    window,
    R: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Write the gradients of a block of keys and values, summed over HEADS query heads.

    Args:
        q: Pointer to the queries.
        k: Pointer to the keys.
        v: Pointer to the values.
        grad: Pointer to the gradients of the outputs.
        lses: Pointer to the LSEs [H, T].
        dots: Pointer to the products of outputs and their gradients [H, T].
        dk: Pointer to the gradients of the keys [H / HEADS, T, K].
        dv: Pointer to the gradients of the values [H / HEADS, T, V].
        blocks: Pointer to the numbers of row blocks that see a key block, key block by key block.
        offsets: Pointer to the ends of parts of `blocks`, after a 0. Each key block has two parts:
            first the row blocks that need no mask, then the others.
        token_layout: Stops and positions, as in `is_seen`.
        num_rows: T.
        scale: Factor of products.
        softcap: Limit of the size of logits.
        window: Number of positions of the window or chunk.
        R: Query heads per key head.
        K: Numbers of a key.
        V: Numbers of a value.
        BLOCK_K: Width of the block that holds a key.
        BLOCK_V: Width of the block that holds a value.
        BLOCK_M: Rows of a block.
        BLOCK_N: Keys of a block.
        HAS_WINDOW: Which window there is, as in `is_seen`.
        HAS_CAP: Whether there is a soft cap.
        HEADS: Query heads of a program, all of one key head.
    """
    # The first keys are seen by most rows, so they start first.
    block, first = tl.program_id(0), tl.program_id(1) * HEADS
    tree = token_layout, num_rows, window
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    k_NK = load_rows(k, first // R, key, num_rows, K, BLOCK_K)
    v_NV = load_rows(v, first // R, key, num_rows, V, BLOCK_V)
    dk_NK = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    dv_NV = tl.zeros([BLOCK_N, BLOCK_V], tl.float32)
    for number in range(HEADS):
        head = first + number
        for masked in tl.static_range(2):
            part = offsets + 2 * block + masked
            for at in range(tl.load(part), tl.load(part + 1)):
                row = tl.load(blocks + at) * BLOCK_M + tl.arange(0, BLOCK_M)
                q_MK = load_rows(q, head, row, num_rows, K, BLOCK_K)
                grad_MV = load_rows(grad, head, row, num_rows, V, BLOCK_V)
                at_row = head.to(tl.int64) * num_rows + row
                lse = tl.load(lses + at_row, mask=row < num_rows, other=0.0) * LOG2E
                dot = tl.load(dots + at_row, mask=row < num_rows, other=0.0)
                logit, slope = logits_of(product(k_NK, tl.trans(q_MK)), scale, softcap, HAS_CAP)
                weight = tl.exp2(logit - lse[None, :])
                if masked:
                    seen = is_seen(row[None, :], key[:, None], tree, HAS_WINDOW)
                    weight = tl.where(seen, weight, 0.0)
                dv_NV += product(weight.to(grad_MV.dtype), grad_MV)
                d_NM = weight * (product(v_NV, tl.trans(grad_MV)) - dot[None, :])
                if HAS_CAP:
                    d_NM *= slope
                dk_NK += product(d_NM.to(q_MK.dtype), q_MK)
    store_rows(dk_NK * scale, dk, tl.program_id(1), key, num_rows, K, BLOCK_K)
    store_rows(dv_NV, dv, tl.program_id(1), key, num_rows, V, BLOCK_V)
