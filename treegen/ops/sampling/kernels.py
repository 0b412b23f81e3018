"""Token draws on a GPU in one pass over the logits: inverse CDF, block by block.

The first kernel reads each logit once and stores, per row and block of the vocabulary, the block's
largest logit and its sums of exponentials, with and without temperature. The second finds the block
that contains the row's uniform number, and searches only that block. If a mask restricts a row,
tempered sums include only allowed tokens; plain sums include all, because log-probabilities are the
model's.

Legend: P rows, N draws of a row, V vocabulary, B blocks of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from treegen.ops.sampling.logits import Masks

BLOCK = 4096
# The number of rows determines where these arrays start in memory. Without this list, Triton would
# compile a kernel for each alignment.
SUMS = ("tops", "plain", "tempered", "free")


@triton.jit
def _mask_logits(x, at, in_bounds, bits, mask_index, words):
    """Return the logits of some tokens, with minus infinity for tokens that a mask bars.

    Args:
        x: Logits of the tokens.
        at: Ids of the tokens.
        in_bounds: Which of the tokens exist.
        bits: Pointer to the masks, int32 [masks, words].
        mask_index: Index of the mask; none if negative.
        words: Words of 32 bits per mask.
    """
    first = tl.maximum(mask_index, 0).to(tl.int64) * words
    word = tl.load(bits + first + at // 32, mask=in_bounds, other=0)
    is_free = ((word >> (at % 32)) & 1) != 0
    return tl.where(is_free | (mask_index < 0), x, float("-inf"))


@triton.jit(do_not_specialize_on_alignment=SUMS)
def _block_sums(
    logits,
    temperature,
    bits,
    masks,
    tops,
    plain,
    tempered,
    free,
    row_stride,
    words,
    V,
    B,
    HAS_MASK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Compute the sums of one block; one program per row and block.

    Sums are of exp(x - top), where top is the block's largest logit. With masks, tops and tempered
    include only allowed tokens; free and plain include all tokens.

    Args:
        logits: Pointer to the logits [P, V].
        temperature: Pointer to the temperature of each row [P].
        bits: Pointer to the masks, int32 [masks, words].
        masks: Pointer to the mask of each row [P]; -1 for none.
        tops: Pointer to the output of the largest logits [P, B].
        plain: Pointer to the output of sums without temperature [P, B].
        tempered: Pointer to the output of sums with temperature [P, B].
        free: Pointer to the output of the largest logits without masks [P, B].
        row_stride: Stride of `logits` between rows, in elements.
        words: Words of 32 bits per mask.
        V: Tokens of the vocabulary.
        B: Blocks of the vocabulary.
        HAS_MASK: Whether there are masks.
        BLOCK: Tokens per block.
    """
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    shift = tl.where(top == float("-inf"), 0.0, top)
    inverse = 1.0 / tl.load(temperature + row)
    weight = tl.sum(tl.exp(x - shift), 0)
    tl.store(plain + row * B + block, weight)
    # Exponentials take as long as reading the logits, so at temperature 1 they are computed once.
    if HAS_MASK:
        tl.store(free + row * B + block, top)
        x = _mask_logits(x, at, at < V, bits, tl.load(masks + row), words)
        top = tl.max(x, 0)
        shift = tl.where(top == float("-inf"), 0.0, top)
        weight = tl.sum(tl.exp((x - shift) * inverse), 0)
    elif inverse != 1.0:
        weight = tl.sum(tl.exp((x - shift) * inverse), 0)
    tl.store(tops + row * B + block, top)
    tl.store(tempered + row * B + block, weight)


@triton.jit
def _uniform(seed, step):
    """Return a float64 in [0, 1), as `treegen.ops.sampling.draw.uniforms` does."""
    z = seed + (step + 1) * (-7046029254386353131)
    z = (z ^ ((z >> 30) & (2**34 - 1))) * -4658895280553007687
    z = (z ^ ((z >> 27) & (2**37 - 1))) * -7723592293110705685
    z = z ^ ((z >> 31) & (2**33 - 1))
    return ((z >> 11) & (2**53 - 1)).to(tl.float64) * 2.0**-53


@triton.jit(
    do_not_specialize=("N",), do_not_specialize_on_alignment=("seeds", "steps", "forced", *SUMS)
)
def _pick(
    logits,
    temperature,
    greedy,
    forced,
    seeds,
    steps,
    bits,
    masks,
    tops,
    plain,
    tempered,
    free,
    tokens,
    logprobs,
    lses,
    row_stride,
    words,
    V,
    B,
    N,
    FIRST,
    FIRST_BLOCK,
    MY_BLOCKS,
    HAS_GREEDY: tl.constexpr,
    HAS_FORCED: tl.constexpr,
    HAS_MASK: tl.constexpr,
    ROOM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Draw one token; one program for each of a row's N draws.

    The token is the first whose cumulative weight passes the target, or the forced token. A draw
    that falls into a block of another GPU is stored as 0.

    Args:
        logits: Pointer to this GPU's logits [P, V].
        temperature: Pointer to the temperature of each row [P].
        greedy: Pointer to whether each row takes the most likely token [P].
        forced: Pointer to the forced token of each row, or -1 [P].
        seeds: Pointer to the seed of each draw [P, N].
        steps: Pointer to the number of tokens before each draw [P, N].
        bits: Pointer to the masks, int32 [masks, words].
        masks: Pointer to the mask of each row [P]; -1 for none.
        tops: Pointer to the blocks' largest logits [P, B].
        plain: Pointer to the blocks' sums without temperature [P, B].
        tempered: Pointer to the blocks' sums with temperature [P, B].
        free: Pointer to the blocks' largest logits without masks [P, B].
        tokens: Pointer to the output of tokens, every second int64.
        logprobs: Pointer to the output of log-probabilities, every fourth float32.
        lses: Pointer to the output of LSEs, every fourth float32.
        row_stride: Stride of `logits` between rows, in elements.
        words: Words of 32 bits per mask.
        V: This GPU's tokens of the vocabulary.
        B: Blocks of the whole vocabulary.
        N: Draws per row.
        FIRST: First token of this GPU's part of the vocabulary.
        FIRST_BLOCK: First block of this part.
        MY_BLOCKS: Blocks of this part.
        HAS_GREEDY: Whether any row takes the most likely token.
        HAS_FORCED: Whether any row has a forced token.
        HAS_MASK: Whether there are masks.
        ROOM: B, rounded up to a power of two.
        BLOCK: Tokens per block.
    """
    draw = tl.program_id(0).to(tl.int64)
    row = draw // N
    b = tl.arange(0, ROOM)
    in_bounds = b < B
    top = tl.load(tops + row * B + b, mask=in_bounds, other=float("-inf"))
    best = tl.max(top, 0)
    shift = tl.where(best == float("-inf"), 0.0, best)
    inverse = 1.0 / tl.load(temperature + row)
    sums = tl.load(plain + row * B + b, mask=in_bounds, other=0.0)
    all_top, all_shift = top, shift
    if HAS_MASK:
        all_top = tl.load(free + row * B + b, mask=in_bounds, other=float("-inf"))
        all_best = tl.max(all_top, 0)
        all_shift = tl.where(all_best == float("-inf"), 0.0, all_best)
    lse = all_shift + tl.log(tl.sum(sums * tl.exp(all_top - all_shift), 0))
    weights = tl.load(tempered + row * B + b, mask=in_bounds, other=0.0)
    weights = weights * tl.exp((top - shift) * inverse)
    reached = tl.cumsum(weights, 0)
    uniform = _uniform(tl.load(seeds + draw), tl.load(steps + draw)).to(tl.float32)
    target = uniform * tl.sum(weights, 0)
    # The block is the first whose cumulative weight exceeds the target. Rounding may leave no such
    # block; then it is the last block with any weight.
    last = tl.max(tl.where(weights > 0, b, 0), 0)
    block = tl.minimum(tl.sum(tl.where(reached <= target, 1, 0), 0), last)
    is_greedy = HAS_GREEDY and tl.load(greedy + row) != 0
    block = tl.where(is_greedy, tl.min(tl.where(top == best, b, ROOM), 0), block)
    before = tl.sum(tl.where(b < block, weights, 0.0), 0)

    block = tl.minimum(block, B - 1)  # with NaN logits, no block may equal the best
    is_mine = (block >= FIRST_BLOCK) & (block < FIRST_BLOCK + MY_BLOCKS)
    block = tl.where(is_mine, block - FIRST_BLOCK, 0)
    n = tl.arange(0, BLOCK)
    at = block * BLOCK + n
    x = tl.load(logits + row * row_stride + at, mask=at < V, other=float("-inf")).to(tl.float32)
    if HAS_MASK:
        x = _mask_logits(x, at, at < V, bits, tl.load(masks + row), words)
    weight = tl.exp((x - shift) * inverse)
    inside = tl.cumsum(weight, 0)
    last = tl.max(tl.where(weight > 0, n, 0), 0)
    index = tl.minimum(tl.sum(tl.where(inside <= target - before, 1, 0), 0), last)
    index = tl.where(is_greedy, tl.min(tl.where(x == best, n, BLOCK), 0), index)
    index = tl.minimum(index, BLOCK - 1)
    chosen = tl.max(tl.where(n == index, x, float("-inf")), 0)
    # The caller rejects NaN logits, but the token must be in the vocabulary even then.
    token = (FIRST + tl.minimum(block * BLOCK + index, V - 1)).to(tl.int64)
    if HAS_FORCED:
        forced_token = tl.load(forced + row)
        forced_at = tl.minimum(tl.maximum(forced_token - FIRST, 0), V - 1)
        forced_logit = tl.load(logits + row * row_stride + forced_at).to(tl.float32)
        chosen = tl.where(forced_token >= 0, forced_logit, chosen)
        token = tl.where(forced_token >= 0, forced_token, token)
        is_mine = tl.where(forced_token >= 0, forced_token == FIRST + forced_at, is_mine)
    tl.store(tokens + 2 * draw, tl.where(is_mine, token, 0))
    tl.store(logprobs + 4 * draw, tl.where(is_mine, chosen - lse, 0.0))
    tl.store(lses + 4 * draw, tl.where(is_mine, lse, 0.0))


class VocabPart(NamedTuple):
    """The part of the vocabulary whose logits are on this GPU."""

    rank: int
    """The number of the part. All parts but the last have the same size."""
    first: int
    """The first token of the part."""
    size: int
    """Number of real logits."""


Exchange = Callable[[Tensor], Tensor]


def draw_blocks(
    logits_PV: Tensor,
    seeds_PN: Tensor,
    steps_PN: Tensor,
    temperature_P: Tensor,
    greedy_P: Tensor | None,
    forced_P: Tensor | None = None,
    *,
    masks: Masks | None = None,
    part: VocabPart | None = None,
    gather: Exchange | None = None,
    total: Exchange | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw N tokens from each of P rows of logits, block by block.

    Args:
        logits_PV: Logits [P, V] of any floating type.
        seeds_PN: Seed of each draw, int64 [P, N], dense.
        steps_PN: Number of tokens drawn before each draw, int64 [P, N], dense.
        temperature_P: Temperature of each row [P]; not 0 if greedy_P is false.
        greedy_P: Which rows take the most likely token [P]; None for none.
        forced_P: The token that a row gets instead of its draws, or -1, int64 [P], dense. Default:
            all tokens are drawn.
        masks: The tokens of the whole vocabulary that may be drawn. Default: all. Not supported
            together with `part`.
        part: The part of the vocabulary to which the logits belong. Default: the whole vocabulary.
        gather: Concatenates the sums [..., B] of all parts along the last dimension. Required with
            `part`.
        total: Sums the draws of all parts, of which only one is not 0. Required with `part`.

    Returns:
        Tokens [P, N] (int64), their log-probabilities [P, N] and the logits' LSE [P] (float32,
        natural logarithms). The LSE of a row with a NaN is not finite. The results are views of one
        tensor, so they go to the host in one copy.
    """
    rows, width = logits_PV.shape
    vocab_part = part or VocabPart(0, 0, width)
    blocks = my_blocks = triton.cdiv(width, BLOCK)
    assert masks is None or part is None
    num_sums = 3 if masks is None else 4
    sums = torch.empty(num_sums, rows, blocks, dtype=torch.float32, device=logits_PV.device)
    bits, index_P = (logits_PV, seeds_PN) if masks is None else (masks.bits_KW, masks.index_P)
    words = 0 if masks is None else bits.shape[1]
    draws = seeds_PN.shape[1]
    result_PN2 = torch.empty(rows, draws, 2, dtype=torch.int64, device=logits_PV.device)
    stride = logits_PV.stride(0)
    if rows * draws:
        _block_sums[(rows, blocks)](
            logits_PV,
            temperature_P,
            bits,
            index_P,
            *sums[:3],
            sums[-1],
            stride,
            words,
            vocab_part.size,
            blocks,
            HAS_MASK=masks is not None,
            BLOCK=BLOCK,
        )
        if gather is not None:
            sums = gather(sums)
            blocks = sums.shape[-1]
        _pick[(rows * draws,)](
            logits_PV,
            temperature_P,
            seeds_PN if greedy_P is None else greedy_P,
            seeds_PN if forced_P is None else forced_P,
            seeds_PN,
            steps_PN,
            bits,
            index_P,
            *sums[:3],
            sums[-1],
            result_PN2[..., 0],
            *result_PN2.view(torch.float32)[..., 2:].unbind(-1),
            stride,
            words,
            vocab_part.size,
            blocks,
            draws,
            vocab_part.first,
            vocab_part.rank * my_blocks,
            my_blocks,
            HAS_GREEDY=greedy_P is not None,
            HAS_FORCED=forced_P is not None,
            HAS_MASK=masks is not None,
            ROOM=triton.next_power_of_2(blocks),
            BLOCK=BLOCK,
        )
        if total is not None:
            # All parts but one are zeros, so integer sums preserve the bits of numbers of any type.
            result_PN2 = total(result_PN2)
    logprobs_PN, lse_PN = result_PN2.view(torch.float32)[..., 2:].unbind(-1)
    return result_PN2[..., 0], logprobs_PN, lse_PN[:, 0] if draws else lse_PN[:, :1].sum(1)
