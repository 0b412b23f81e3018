"""The walk that looks for races in shared memory, on programs of which it is known."""

import pytest
from shared_races import RaceError, Walk

# Of two warps, each thread knows its own word, its neighbour's, and one of the other warp's.
BEGIN = """
.reqntid 64
mov.u32 %r1, %tid.x;
mov.b32 %r2, global_smem;
mad.lo.s32 %own, %r1, 4, %r2;
xor.b32 %near, %own, 4;
xor.b32 %far, %own, 128;
mov.b32 %r3, 0;
$loop:
"""
END = """
add.s32 %r3, %r3, 1;
setp.lt.s32 %p1, %r3, 3;
@%p1 bra $loop;
ret;
"""
WRITE = "st.shared.b32 [%own], %r1;"
READ = "ld.shared.b32 %r9, [{}];"
COPY = "cp.async.ca.shared.global [ %own + 0 ], [ %rd1 + 0 ], 0x4, %r8;"
COMMIT, WAIT = "cp.async.commit_group;", "cp.async.wait_group 0;"
BLOCK, WARP = "bar.sync 0;", "bar.warp.sync -1;"
# A product of both warps, on 8 rows of 32 bytes from the first byte on.
MULTIPLY = "\n".join(
    [
        "mov.b64 %rd5, -4611686018427387904;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1}, {%f2}, %rd5, %p9, 1, 1, 0;",
        "wgmma.commit_group.sync.aligned;",
    ]
)
DONE = "wgmma.wait_group.sync.aligned 0;"


def races(*lines: str) -> bool:
    walk = Walk(BEGIN + "\n".join(lines) + END)
    try:
        walk.run()
    except RaceError:
        return True
    assert walk.num_accesses >= 3
    return False


@pytest.mark.parametrize(
    ("lines", "race"),
    [
        ([WRITE, READ.format("%own")], False),
        ([READ.format("%near"), READ.format("%far")], False),
        # What one has written, another reads, and the next step writes it again.
        ([WRITE, READ.format("%near")], True),
        ([WRITE, WARP, READ.format("%near")], True),
        ([WRITE, WARP, READ.format("%near"), WARP], False),
        ([WARP, WRITE, WARP, READ.format("%far"), WARP], True),
        ([WRITE, BLOCK, READ.format("%far")], True),
        ([BLOCK, WRITE, READ.format("%far")], True),
        ([WRITE, BLOCK, READ.format("%far"), BLOCK], False),
        ([WRITE, BLOCK, READ.format("%near"), WARP], False),
        # A copy runs until its thread waits, and others see it after a barrier behind that.
        ([COPY, COMMIT, WAIT, READ.format("%own")], False),
        ([COPY, COMMIT, READ.format("%own"), WAIT], True),
        ([COPY, WAIT, READ.format("%own")], True),
        ([COPY, COMMIT, WAIT, READ.format("%far"), BLOCK], True),
        ([COPY, COMMIT, BLOCK, WAIT, READ.format("%far"), BLOCK], True),
        ([COPY, COMMIT, WAIT, BLOCK, READ.format("%far"), BLOCK], False),
        ([COPY, COMMIT, WAIT, BLOCK, READ.format("%far")], True),
        # A product reads until it is waited for.
        ([WRITE, BLOCK, MULTIPLY, DONE, BLOCK], False),
        ([WRITE, MULTIPLY, DONE, BLOCK], True),
        ([WRITE, BLOCK, MULTIPLY, BLOCK, DONE], True),
        ([WRITE, BLOCK, MULTIPLY, BLOCK], True),
        ([COPY, COMMIT, WAIT, BLOCK, MULTIPLY, DONE], True),
        # Only some threads write.
        (["setp.eq.s32 %p2, %r1, 5;", f"@%p2 {WRITE}", READ.format("%own")], False),
        (["setp.eq.s32 %p2, %r1, 5;", f"@%p2 {WRITE}", READ.format("%near")], True),
        (["setp.eq.s32 %p2, %r1, 5;", f"@!%p2 {WRITE}", READ.format("%own")], False),
    ],
)
def test_races_are_found_and_nothing_else(lines: list[str], race: bool) -> None:
    assert races(*lines) == race


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(AssertionError, match="address is not known"):
        races("ld.global.b32 %r7, [%rd1];", "st.shared.b32 [%r7], %r1;")
    with pytest.raises(AssertionError, match="atom"):
        races("atom.shared.add.u32 %r7, [%own], 1;")
