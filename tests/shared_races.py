"""Data races in the shared memory of a compiled Triton kernel, found by walking through its PTX.

All threads of a block take the same way through such a kernel, so one walk computes the addresses
of all of them, for every step of every loop. Two accesses to a byte race if different threads make
them, one of them writes, and no barrier lies between the end of the first and the start of the
second. Copies and products that run asynchronously end where their thread waits for them.

Values that come from memory are unknown. Where an address depends on one the walk fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Value = Ints | None  # of each thread; None is unknown

_INSTRUCTION: Final = re.compile(r"(?:@(!?)(%p\w+)\s+)?([a-z][\w.:]*)\s*(.*)")
_OPERAND: Final = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*")
_ADDRESS: Final = re.compile(r"\[\s*(\S+?)\s*(?:\+\s*(-?\w+)\s*)?\]")
_BITS: Final = {"b8": 8, "b16": 16, "b32": 32, "b64": 64, "u32": 32, "s32": 32, "f32": 32}
_NOBODY: Final = 1 << 30


class RaceError(AssertionError):
    """Two threads access the same byte with no barrier between, and one of them writes."""


@dataclass(frozen=True)
class Instruction:
    """A line of PTX: `@guard name operands`, where the guard may be negated."""

    line: int
    negated: bool
    guard: str
    name: str
    operands: list[str]


def parse(ptx: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a kernel, and which one follows each label."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for number, line in enumerate(ptx.splitlines(), start=1):
        text = line.partition("//")[0].strip()
        if text.endswith(":"):
            labels[text[:-1]] = len(found)
        elif text.endswith(";") and not text.startswith("."):
            match = _INSTRUCTION.fullmatch(text[:-1].strip())
            assert match, f"line {number} is no instruction: {text}"
            negated, guard, name, operands = match.groups()
            listed = [each.strip() for each in _OPERAND.findall(operands)]
            found.append(Instruction(number, bool(negated), guard or "", name, listed))
    return found, labels


def barriers(ptx: str) -> list[int]:
    """The numbers of the lines with barriers, from 1."""
    return [each.line for each in parse(ptx)[0] if each.name.startswith("bar.")]


class _Touched:
    """Who has touched each byte since a barrier: of all of them the first and the last."""

    def __init__(self, size: int) -> None:
        self.first = np.full(size, _NOBODY)
        self.last = np.full(size, -1)

    def clear(self) -> None:
        self.first.fill(_NOBODY)
        self.last.fill(-1)

    def add(self, at: Ints, who: Ints) -> None:
        np.minimum.at(self.first, at, who)
        np.maximum.at(self.last, at, who)

    def by_others(self, at: Ints, who: Ints) -> NDArray[np.bool_]:
        first, last = self.first[at], self.last[at]
        races: NDArray[np.bool_] = (last >= 0) & ((first != who) | (last != who))
        return races


class _Memory:
    """Accesses to shared memory that no barrier has ended yet.

    A barrier of the block orders all threads, and one of a warp those of each warp.
    """

    def __init__(self, size: int) -> None:
        self._threads = {write: _Touched(size) for write in (False, True)}
        self._warps = {write: _Touched(size) for write in (False, True)}
        self._running = {write: np.zeros(size, np.int64) for write in (False, True)}
        self._open: dict[bool, list[tuple[Ints, Ints]]] = {False: [], True: []}
        self._groups: dict[bool, list[list[tuple[Ints, Ints]]]] = {False: [], True: []}

    def synchronize(self, *, block: bool) -> None:
        for touched in (self._threads, self._warps) if block else (self._threads,):
            for each in touched.values():
                each.clear()

    def access(self, at: Ints, who: Ints, *, write: bool, asynchronous: bool = False) -> None:
        """at: bytes. who: the thread that accesses each.

        Asynchronous writes are copies, and such reads are products.
        """
        races = self._running[True][at] > 0
        if write:
            races |= self._running[False][at] > 0
        for earlier in (True, False) if write else (True,):
            races |= self._threads[earlier].by_others(at, who)
            races |= self._warps[earlier].by_others(at, who // 32)
        if races.any():
            which = int(races.argmax())
            raise RaceError(f"byte {at[which]} of shared memory, thread {who[which]}")
        if asynchronous:
            np.add.at(self._running[write], at, 1)
            self._open[write].append((at, who))
        else:
            self._end(at, who, write=write)

    def _end(self, at: Ints, who: Ints, *, write: bool) -> None:
        self._threads[write].add(at, who)
        self._warps[write].add(at, who // 32)

    def commit(self, *, write: bool) -> None:
        self._groups[write].append(self._open[write])
        self._open[write] = []

    def wait(self, num_left: int, *, write: bool) -> None:
        groups = self._groups[write]
        while len(groups) > num_left:
            for at, who in groups.pop(0):
                np.subtract.at(self._running[write], at, 1)
                self._end(at, who, write=write)


def _signed(value: Ints, bits: int) -> Ints:
    return value if bits == 64 else (value ^ (1 << (bits - 1))) - (1 << (bits - 1))


def _shift_right(a: Ints, b: Ints, bits: int) -> Ints:
    return a >> b if bits < 64 else (a >> b) & ((1 << (64 - b)) - 1)


def _field(a: Ints, begin: Ints, length: Ints, bits: int, signed: bool) -> Ints:
    field = (a >> begin) & ((1 << length) - 1)
    top = 1 << (length - 1)
    return (field ^ top) - top if signed else field


_COMPARE: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


_BINARY: Final[dict[tuple[str, ...], Callable[[Ints, Ints], Ints]]] = {
    ("mov",): lambda a, b: a,
    ("add",): lambda a, b: a + b,
    ("sub",): lambda a, b: a - b,
    ("mul", "lo"): lambda a, b: a * b,
    ("mul", "wide"): lambda a, b: a * b,
    ("and",): lambda a, b: a & b,
    ("or",): lambda a, b: a | b,
    ("xor",): lambda a, b: a ^ b,
    ("min",): np.minimum,
    ("not",): lambda a, b: ~a,
}


def _compute(words: list[str], values: list[Ints]) -> Value:
    """The result of an instruction on integers; None for one that no address needs."""
    kind = words[-1]
    if (kind != "pred" and kind[1:] not in ("8", "16", "32", "64")) or kind[0] == "f":
        return None
    bits, signed = (1, False) if kind == "pred" else (int(kind[1:]), kind[0] == "s")
    if words[0] == "cvt":
        (source,) = values
        return _signed(source, int(words[-1][1:])) if signed else source
    given = [_signed(each, bits) if signed and words[0] != "selp" else each for each in values]
    none = np.zeros(1, np.int64)
    a, b, c = [*given, none, none, none][:3]
    name = tuple(words[:-1])
    if name in _BINARY:
        return _BINARY[name](a, b)
    match name:
        case ("mul", "hi") if bits == 32:
            return (a * b) >> 32
        case ("mad", "lo" | "wide"):
            return a * b + values[2]
        case ("prmt",):
            picked = [int(c[0]) >> 4 * i & 15 for i in range(4)]
            sources = [each >> 8 * i & 255 for each in (a, b) for i in range(4)]
            assert max(picked) < 8, "signs are copied"
            return np.asarray(sum(sources[at] << 8 * i for i, at in enumerate(picked)), np.int64)
        case ("shl",):
            return (a << b) & 0xFFFF if bits == 16 else a << b
        case ("shr",):
            return a >> b if signed else _shift_right(a, b, bits)
        case ("bfe",):
            return _field(values[0], values[1], values[2], bits, signed)
        case ("selp",):
            return np.where(c != 0, a, b)
        case ("setp", how):
            return np.asarray(_COMPARE[how](a, b), np.int64)
    return None


class Walk:
    """One way through a kernel, by all threads of a block."""

    def __init__(self, ptx: str, without: int = 0) -> None:
        """without: the line of a barrier that is left out."""
        self._instructions, self._labels = parse(ptx)
        self._without = without
        size = re.search(r"\.reqntid (\d+)", ptx)
        assert size
        self._threads = np.arange(int(size[1]))
        self._values: dict[str, Value] = {"%tid.x": self._threads}
        self._values |= dict.fromkeys(("%ctaid.x", "%ctaid.y"), self._all(0))
        self._values["global_smem"] = self._all(0)
        self._memory = _Memory(1 << 18)
        self.num_accesses = 0

    def run(self) -> None:
        """Walk through the kernel.

        Raises:
            RaceError: two threads race. The message has the line at which the second one does.
        """
        at = 0
        while at < len(self._instructions):
            each = self._instructions[at]
            at += 1
            if each.name == "ret" or each.line == self._without:
                continue
            try:
                if each.name.startswith("bra"):
                    at = self._branch(each, at)
                else:
                    self._step(each)
            except RaceError as error:
                raise RaceError(f"line {each.line}, {each.name}: {error}") from None

    def _all(self, number: int) -> Ints:
        return np.full(len(self._threads), number)

    def _value(self, operand: str) -> Value:
        if re.fullmatch(r"-?(0x[\dA-Fa-f]+|\d+)U?", operand):
            number = int(operand.rstrip("U"), 0)
            return self._all(number - (1 << 64) if number >= 1 << 63 else number)
        return self._values.get(operand)

    def _guarded(self, each: Instruction) -> Value:
        """Whether each thread does it."""
        if not each.guard:
            return self._all(1)
        value = self._values.get(each.guard)
        return value if value is None or not each.negated else 1 - value

    def _branch(self, each: Instruction, following: int) -> int:
        target, does = self._labels[each.operands[0]], self._guarded(each)
        if does is None:  # it depends on data, and what follows the branch is walked through
            rest = self._instructions[target:]
            assert target > following and not any("shared" in other.name for other in rest)
            return following
        assert len(set(does.tolist())) == 1, "threads take different ways"
        return target if does[0] else following

    def _step(self, each: Instruction) -> None:
        words = each.name.replace("::", ":").split(".")
        match words[0], *words[1:3]:
            case "bar", "sync", *_:
                assert not each.guard and each.operands == ["0"], "some threads wait for each other"
                self._memory.synchronize(block=True)
            case "bar", "warp", "sync":
                assert not each.guard and each.operands == ["-1"]
                self._memory.synchronize(block=False)
            case "cp", "async", "commit_group":
                self._memory.commit(write=True)
            case "cp", "async", "wait_group":
                self._memory.wait(int(each.operands[0]), write=True)
            case "cp", "async", "ca" | "cg":
                size = int(each.operands[2], 0)
                self._access(each, each.operands[0], size, write=True, asynchronous=True)
            case "wgmma", "commit_group", _:
                self._memory.commit(write=False)
            case "wgmma", "wait_group", _:
                self._memory.wait(int(each.operands[0]), write=False)
            case "wgmma", "mma_async", _:
                self._multiply(each)
            case "wgmma", "fence", _:
                pass
            case ("ldmatrix" | "stmatrix") as name, *_:
                lanes = {"x1": 8, "x2": 16, "x4": 32}[next(w for w in words if w[0] == "x")]
                address = each.operands[0 if name == "stmatrix" else 1]
                self._access(each, address, 16, write=name == "stmatrix", lanes=lanes)
                self._forget(each)
            case ("ld" | "st") as name, ("shared" | "shared:cta"), *_:
                size = _BITS[words[-1]] // 8 * (int(words[2][1:]) if words[2][0] == "v" else 1)
                self._access(each, each.operands[name == "ld"], size, write=name == "st")
                self._forget(each)
            case _:
                known = ("fence", "st") if "shared" not in each.name else ("fence",)
                assert words[0] in known or not {"shared", "mbarrier", "bulk"} & set(words), each
                self._assign(each, words)

    def _forget(self, each: Instruction) -> None:
        for name in re.findall(r"%\w+", each.operands[0] if each.operands else ""):
            if not each.operands[0].startswith("["):
                self._values[name] = None

    def _assign(self, each: Instruction, words: list[str]) -> None:
        if not each.operands or each.operands[0][0] in "{[" or words[0] in ("ld", "st", "fence"):
            self._forget(each)
            return
        name, *operands = each.operands
        values = [value for value in map(self._value, operands) if value is not None]
        does, before = self._guarded(each), self._values.get(name)
        result: Value = None
        if len(values) == len(operands) and does is not None:
            result = _compute(words, values)
        if result is not None:
            bits = {"pred": 1, "64": 64}.get(words[-1].lstrip("bsu"), 32)
            bits = 64 if words[1] == "wide" else bits
            bits = int(words[1][1:]) if words[0] == "cvt" else bits
            result = result if bits == 64 else result & ((1 << bits) - 1)
            if each.guard:
                assert does is not None
                result = None if before is None else np.where(does != 0, result, before)
        self._values[name] = result

    def _access(
        self,
        each: Instruction,
        address: str,
        size: int,
        *,
        write: bool,
        lanes: int = 32,
        asynchronous: bool = False,
    ) -> None:
        match = _ADDRESS.fullmatch(address)
        assert match, address
        base, does = self._value(match[1]), self._guarded(each)
        assert base is not None, f"line {each.line}: an address is not known"
        acting = self._threads % 32 < lanes
        if does is not None:
            acting &= does != 0
        first = base[acting] + int(match[2] or "0", 0)
        at = (first[:, None] + np.arange(size)).ravel()
        who = np.repeat(self._threads[acting], size)
        self._memory.access(at, who, write=write, asynchronous=asynchronous)
        self.num_accesses += 1

    def _multiply(self, each: Instruction) -> None:
        """A product of a warp group, whose right side is described by its place in memory."""
        shape = re.search(r"\.m64n(\d+)k16\.f32\.bf16\.bf16", each.name)
        assert shape and each.operands[1].startswith("{") and each.operands[-1] == "0"
        description = self._value(each.operands[2])
        assert description is not None, f"line {each.line}: a description is not known"
        rows = np.arange(int(shape[1]))
        for one in np.unique(description):
            width = {1: 128, 2: 64, 3: 32}[int(one) >> 62 & 3]  # of its swizzled rows, in bytes
            start, stride = (int(one) & 0x3FFF) << 4, (int(one) >> 32 & 0x3FFF) << 4
            begins = start // width * width + rows // 8 * stride + rows % 8 * width
            at = (begins[:, None] + np.arange(width)).ravel()
            readers = self._threads[description == one]
            for who in (readers[0], readers[-1] // 32 * 32):  # what lies between changes nothing
                self._memory.access(at, np.full(len(at), who), write=False, asynchronous=True)
        self.num_accesses += 1
        self._forget(each)
