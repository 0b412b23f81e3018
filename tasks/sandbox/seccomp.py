"""The allow-list of system calls as a seccomp filter, assembled here without a library."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from typing import Final

from treegen.tasks.sandbox.syscalls import ALWAYS, CHECKS, OWN_PID, SOMETIMES, Check

_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_REFUSE: Final = 0x00050000 | errno.EPERM
_MISSING: Final = 0x00050000 | errno.ENOSYS
_PRETEND: Final = 0x00050000  # error number 0 means success
_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT: Final = 0x40000000  # set in the numbers of x32 calls, another set of calls on x86_64
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22

libc: Final = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def machines() -> tuple[str, ...]:
    """Return the machines for which a filter can be built."""
    return tuple(_ARCHITECTURES)


def assemble(machine: str) -> bytes:
    """Return the filter for a machine, with OWN_PID as the placeholder of the process id."""
    code = [_op(_LOAD, 4), _op(_EQUAL, _ARCHITECTURES[machine], 1, 0), _op(_RETURN, _KILL)]
    code.append(_op(_LOAD, 0))
    if machine == "x86_64":
        code += [_op(_AT_LEAST, _X32_BIT, 0, 1), _op(_RETURN, _KILL)]
    for number in ALWAYS[machine].values():
        code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ALLOW)]
    for name, number in SOMETIMES[machine].items():
        if name == "clone3":
            # Its flags lie in memory, which a filter cannot read. ENOSYS makes libc use clone.
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _MISSING)]
            continue
        block = [line for check in CHECKS[name] for line in _check(check)]
        code += [_op(_EQUAL, number, 0, len(block) + 1), *block, _op(_RETURN, _ALLOW)]
    code.append(_op(_RETURN, _REFUSE))
    return b"".join(code)


def _check(check: Check) -> list[bytes]:
    """Return code that falls through if the argument is one of the values, otherwise refuses."""
    low, high = 16 + 8 * check.index, 20 + 8 * check.index  # both machines are little endian
    code = [_op(_LOAD, high), _op(_EQUAL, 0, 1, 0), _op(_RETURN, _REFUSE)] if check.wide else []
    code.append(_op(_LOAD, low))
    if check.mask != 0xFFFFFFFF:
        code.append(_op(_AND, check.mask))
    for value in check.pretended:
        code += [_op(_EQUAL, value, 0, 1), _op(_RETURN, _PRETEND)]
    num_left = len(check.values)
    for value in check.values:  # a match jumps over the remaining values and the refusal
        code.append(_op(_EQUAL, value, num_left, 0))
        num_left -= 1
    return [*code, _op(_RETURN, _REFUSE)]


def _op(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def install(code: bytes, pid: int) -> None:
    """Apply the filter, permanently, to this thread and everything that it starts.

    Args:
        code: Filter from `assemble`.
        pid: Process id that replaces OWN_PID in the filter.

    Raises:
        OSError: The kernel refuses the filter.
    """
    code = code.replace(struct.pack("=I", OWN_PID), struct.pack("=I", pid))
    program = _Filter(len(code) // 8, code)
    prctl(_PR_SET_NO_NEW_PRIVS, 1)
    prctl(_PR_SET_SECCOMP, 2, ctypes.addressof(program))


def prctl(option: int, first: int, second: int = 0) -> None:
    """Call prctl.

    Args:
        option: The operation.
        first: Its second argument.
        second: Its third argument.

    Raises:
        OSError: The call fails.
    """
    numbers = [ctypes.c_ulong(number) for number in (first, second, 0, 0)]
    check(libc.prctl(ctypes.c_int(option), *numbers), f"prctl({option})")


def syscall(number: int, what: str, *arguments: object) -> int:
    """Make a system call for which libc has no function.

    Args:
        number: Number of the call.
        what: Name of the call, for the error.
        arguments: Arguments of the call, as ctypes values.

    Raises:
        OSError: The call fails.
    """
    return check(libc.syscall(ctypes.c_long(number), *arguments), what)


def check(result: int, what: str) -> int:
    """Return the result of a call.

    Raises:
        OSError: The result is negative; errno has the reason.
    """
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
