"""Numbers in 4 bits and their scales, expanded to bfloat16 in registers by Triton kernels."""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl

# A register has two words of four numbers. Sign, exponent (2 bits) and mantissa (1 bit) of the same
# number of both are moved to these bits of two bfloat16, which are then 2^-126 times the number,
# also for 0 and 0.5. The products after that are exact.
_SHIFTS: Final = (("shl", 12, "shl", 6), ("shl", 8, "shl", 2), ("shl", 4, "shr", 2))
_MOVE: Final = """
    {sign_to}.b32 sign, $4, {sign_by};
    {bits_to}.b32 bits, $4, {bits_by};
    and.b32 bits, bits, 0x01C001C0;
    lop3.b32 bits, sign, 0x80008000, bits, 0xEA;{unscale}
    fma.rn.bf16x2 ${at}, bits, $5, none;"""


def _assembly(unscales: bool) -> str:
    """Return the code that expands two words.

    Args:
        unscales: Whether to multiply numbers by 2^126 first, which factors then need not contain.
    """
    lines = """
{
    .reg .b32 sign, bits, power, none;
    mov.b32 power, 0x7E807E80;
    mov.b32 none, 0x80008000;"""
    unscale = "\n    fma.rn.bf16x2 bits, bits, power, none;" if unscales else ""
    for at, (sign_to, sign_by, bits_to, bits_by) in enumerate((*_SHIFTS, ("shl", 0, "shr", 6))):
        lines += _MOVE.format(
            at=at,
            sign_to=sign_to,
            sign_by=sign_by,
            bits_to=bits_to,
            bits_by=bits_by,
            unscale=unscale,
        )
    return lines + "\n}\n"


EXPAND: tl.constexpr = tl.constexpr(_assembly(unscales=True))
EXPAND_SCALED: tl.constexpr = tl.constexpr(_assembly(unscales=False))
# A number in e4m3 is 2^120 times the bfloat16 with the same exponent and mantissa.
EXPAND_E4M3: tl.constexpr = tl.constexpr("""
{
    .reg .b32 low, high, power, more, none;
    mov.b32 power, 0x7B007B00;
    mov.b32 more, 0x7B807B80;
    mov.b32 none, 0x80008000;
    prmt.b32 low, $2, 0, 0x4140;
    prmt.b32 high, $2, 0, 0x4342;
    shl.b32 low, low, 4;
    shl.b32 high, high, 4;
    fma.rn.bf16x2 low, low, power, none;
    fma.rn.bf16x2 high, high, power, none;
    fma.rn.bf16x2 $0, low, more, none;
    fma.rn.bf16x2 $1, high, more, none;
}
""")
INTERPRETED: tl.constexpr = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _expand_quarter(numbers, factor, IS_SCALED: tl.constexpr):
    """Return numbers of 4 bits times a factor, as `dequantize_words`; for Triton's interpreter."""
    size = numbers.to(tl.int32) & 7
    # Exponents of e2m1 above 0 begin at 1, which is 2^0.
    normal = ((size << 22) + (126 << 23)).to(tl.float32, bitcast=True)
    value = tl.where(size < 2, size.to(tl.float32) * 0.5, normal)
    value = tl.where((numbers & 8) != 0, -value, value)
    value = value * (2.0**-126 if IS_SCALED else 1.0)
    return (value * factor.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def dequantize_words(words, factor, IS_SCALED: tl.constexpr):
    """Return the four numbers of words, lowest bits first, times a factor, in bfloat16.

    Args:
        words: Words, uint16.
        factor: Factors, bfloat16.
        IS_SCALED: Whether factors contain 2^126.
    """
    if INTERPRETED:
        a = _expand_quarter(words & 15, factor, IS_SCALED)
        b = _expand_quarter((words >> 4) & 15, factor, IS_SCALED)
        c = _expand_quarter((words >> 8) & 15, factor, IS_SCALED)
        d = _expand_quarter(words >> 12, factor, IS_SCALED)
    else:
        a, b, c, d = tl.inline_asm_elementwise(
            EXPAND_SCALED if IS_SCALED else EXPAND,
            "=&r,=&r,=&r,=&r,r,r",
            [words, factor],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    return a, b, c, d


@triton.jit
def decode_scales(s, IS_E4M3: tl.constexpr):
    """Return stored scales as bfloat16; those in e4m3 times 2^119, so that they are normal."""
    if IS_E4M3 and INTERPRETED:
        bits = (s.to(tl.int32) << 20).to(tl.float32, bitcast=True)
        factor = (bits * 2.0**120 * 2.0**119).to(tl.bfloat16)
    elif IS_E4M3:
        factor = tl.inline_asm_elementwise(
            EXPAND_E4M3, "=&r,=&r,r", [s], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    else:
        # The exponent becomes a power of two; for exponent 0 it is half of that for 1.
        power = tl.where(s == 0, 0x40, s.to(tl.int16) << 7).to(tl.int16)
        factor = power.to(tl.bfloat16, bitcast=True)
    return factor
