"""Assembles the seccomp filter of the system calls that a program may make.

The filter allows the calls that threads, files in the scratch directory, pipes, timers and asyncio
need, by their numbers on x86_64 and aarch64. All other calls fail with EPERM, such as those that
start a program, reach the network, share memory, or change a file in a way that Landlock does not
control (chmod, chown, utime, truncate by path). fallocate fails too, because it fills a disk at
once and files are checked only at intervals.

File locks are pretended: the call succeeds but takes no lock. In the scratch directory no other
process needs a lock, and a program must not lock a file of the host.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from dataclasses import dataclass
from typing import Final

# Placeholder of the program's own process id, which is known only after the fork.
OWN_PID: Final = 0x7EDC0DE5

_ALWAYS: Final = """
read 0 63;write 1 64;pread64 17 67;pwrite64 18 68;readv 19 65;writev 20 66;preadv 295 69
pwritev 296 70;lseek 8 62;close 3 57;close_range 436 436;fstat 5 80;newfstatat 262 79
stat 4 -;lstat 6 -;statx 332 291;access 21 -;faccessat 269 48;faccessat2 439 439;readlink 89 -
readlinkat 267 78;getcwd 79 17;chdir 80 49;fchdir 81 50;getdents 78 -;getdents64 217 61
dup 32 23;dup2 33 -;dup3 292 24;fsync 74 82;fdatasync 75 83;ftruncate 77 46
rename 82 -;renameat 264 38;renameat2 316 276;mkdir 83 -;mkdirat 258 34;rmdir 84 -;unlink 87 -
unlinkat 263 35;symlink 88 -;symlinkat 266 36;umask 95 166;pipe 22 -;pipe2 293 59;poll 7 -
ppoll 271 73;select 23 -;pselect6 270 72;epoll_create 213 -;epoll_create1 291 20;epoll_ctl 233 21
epoll_wait 232 -;epoll_pwait 281 22;eventfd2 290 19;statfs 137 43;fstatfs 138 44;sendfile 40 71
copy_file_range 326 285;fadvise64 221 223;munmap 11 215;mremap 25 216
mprotect 10 226;msync 26 227;brk 12 214;futex 202 98;set_robust_list 273 99
set_tid_address 218 96;rseq 334 293;sched_yield 24 124;getcpu 309 168;rt_sigaction 13 134
rt_sigprocmask 14 135;rt_sigreturn 15 139;rt_sigpending 127 136;rt_sigtimedwait 128 137
rt_sigsuspend 130 133;sigaltstack 131 132;pause 34 -;restart_syscall 219 128;getpid 39 172
gettid 186 178;getppid 110 173;getuid 102 174;geteuid 107 175;getgid 104 176;getegid 108 177
getresuid 118 148;getresgid 120 150;getgroups 115 158;getrlimit 97 163;setrlimit 160 164
getrusage 98 165;times 100 153;sysinfo 99 179;uname 63 160;exit 60 93;exit_group 231 94
gettimeofday 96 169;time 201 -;nanosleep 35 101;setitimer 38 103;getitimer 36 102;alarm 37 -
timer_create 222 107;timer_settime 223 110;timer_gettime 224 108;timer_getoverrun 225 109
timer_delete 226 111;timerfd_create 283 85;timerfd_settime 286 86;timerfd_gettime 287 87
getrandom 318 278;getsockname 51 204;getpeername 52 205
shutdown 48 210
"""
_SOMETIMES: Final = """
open 2 -;openat 257 56;fcntl 72 25;ioctl 16 29;clone 56 220;kill 62 129;tgkill 234 131
prlimit64 302 261;sched_getaffinity 204 123;sched_setaffinity 203 122;getpgid 121 155
getsid 124 156;prctl 157 167;clock_gettime 228 113;clock_getres 229 114;clock_nanosleep 230 115
socketpair 53 199;sendto 44 206;clone3 435 435;mmap 9 222;getsockopt 55 209
flock 73 32;madvise 28 233;recvfrom 45 207
"""


def _parse_table(text: str) -> dict[str, dict[str, int]]:
    """Parse lines of `name x86_64 aarch64`; a dash means that the machine has no such call."""
    numbers: dict[str, dict[str, int]] = {"x86_64": {}, "aarch64": {}}
    for entry in text.replace("\n", ";").split(";"):
        if entry:
            name, x86_64, aarch64 = entry.split()
            for machine, number in (("x86_64", x86_64), ("aarch64", aarch64)):
                if number != "-":
                    numbers[machine][name] = int(number)
    return numbers


ALWAYS: Final = _parse_table(_ALWAYS)
SOMETIMES: Final = _parse_table(_SOMETIMES)


@dataclass(frozen=True, slots=True)
class Check:
    """A check of one argument of a call."""

    index: int
    """Index of the argument, from 0."""
    values: tuple[int, ...]
    """Allowed values of the masked argument."""
    mask: int = 0xFFFFFFFF
    """The bits to compare."""
    wide: bool = False
    """Whether all 64 bits are compared."""
    pretended: tuple[int, ...] = ()
    """Values for which the call does nothing and returns 0."""


# Any access mode is allowed. O_TRUNC needs write access, because Landlock before version 3 does not
# check it. O_TMPFILE is refused, because a file without a name cannot be counted.
_OPEN_MODES = (0, 1, 2, 0o1001, 0o1002)
_OPEN_MASK = 0o20001003
# The flags of pthread_create in glibc and in musl (which adds CLONE_DETACHED). They only allow
# creating a thread of this process.
_THREAD = (0x3D0F00, 0x7D0F00)
# A mapping may be a shared file, private, or private and anonymous. It may not be shared and
# anonymous: a part of such a mapping keeps all of it in memory, but only the part counts as address
# space. Huge pages are refused, because they use a pool of the host.
_MAPPINGS = (0x01, 0x02, 0x22)
_MAPPING_MASK = 0x4002F
_OWN_CLOCKS = tuple(range(12))  # negative numbers name the clocks of other processes

CHECKS: Final[dict[str, tuple[Check, ...]]] = {
    "open": (Check(1, _OPEN_MODES, _OPEN_MASK),),
    "openat": (Check(2, _OPEN_MODES, _OPEN_MASK),),
    # F_DUPFD, flags, F_GETLK and F_GETPIPE_SZ are allowed; F_SETLK and F_SETLKW are pretended.
    # F_SETOWN and F_SETSIG are refused, because they send signals to other processes.
    "fcntl": (Check(1, (0, 1, 2, 3, 4, 5, 1030, 1032), pretended=(6, 7)),),
    "flock": (Check(1, (), mask=0, pretended=(0,)),),  # every request is pretended
    "mmap": (Check(3, _MAPPINGS, _MAPPING_MASK),),
    # NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, HUGEPAGE, NOHUGEPAGE, and the guards of
    # thread stacks. Other advice merges, poisons or pages out memory of the host.
    "madvise": (Check(2, (0, 1, 2, 3, 4, 8, 14, 15, 102, 103)),),
    # SO_TYPE, SO_ERROR, SO_ACCEPTCONN, SO_PROTOCOL, SO_DOMAIN. SO_PEERPIDFD is refused: it gives a
    # handle to the process at the other end.
    "getsockopt": (Check(1, (1,)), Check(2, (3, 4, 30, 38, 39))),
    # TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX. TIOCSTI is refused.
    "ioctl": (Check(1, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    "clone": (Check(0, _THREAD, wide=True),),
    "kill": (Check(0, (OWN_PID,)),),
    "tgkill": (Check(0, (OWN_PID,)),),
    "prlimit64": (Check(0, (0, OWN_PID)),),
    "sched_getaffinity": (Check(0, (0, OWN_PID)),),
    "sched_setaffinity": (Check(0, (0, OWN_PID)),),
    "getpgid": (Check(0, (0, OWN_PID)),),
    "getsid": (Check(0, (0, OWN_PID)),),
    "prctl": (Check(0, (15, 16)),),  # the name of a thread
    "clock_gettime": (Check(0, _OWN_CLOCKS),),
    "clock_getres": (Check(0, _OWN_CLOCKS),),
    "clock_nanosleep": (Check(0, _OWN_CLOCKS),),
    # asyncio wakes itself up through a pair of sockets. A stream pair cannot be connected
    # elsewhere.
    "socketpair": (Check(0, (1,)), Check(1, (1,), mask=0xF), Check(2, (0,))),
    # MSG_DONTWAIT and MSG_NOSIGNAL only, and no address, so data go only to the other end.
    "sendto": (Check(3, (0,), mask=~0x4040 & 0xFFFFFFFF), Check(4, (0,), wide=True)),
    # MSG_PEEK, MSG_DONTWAIT, MSG_WAITALL.
    "recvfrom": (Check(3, (0,), mask=~0x142 & 0xFFFFFFFF),),
}


# Instructions of classic BPF: load a word, bitwise and, jump if equal, jump if at least, return.
_LOAD, _AND, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
# Values that a filter returns, as the kernel's SECCOMP_RET_* constants.
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_REFUSE: Final = 0x00050000 | errno.EPERM
_MISSING: Final = 0x00050000 | errno.ENOSYS
_PRETEND: Final = 0x00050000  # error number 0 means success
_ARCHITECTURES: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT: Final = 0x40000000  # set in the numbers of x32 calls, another set of calls on x86_64
PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP = 38, 22

libc: Final = ctypes.CDLL(None, use_errno=True)


class _Filter(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


def machines() -> tuple[str, ...]:
    """Return the machines for which a filter can be built."""
    return tuple(_ARCHITECTURES)


def assemble(machine: str) -> bytes:
    """Return the filter for a machine, with OWN_PID as the placeholder of the process id."""
    code = [
        _instruction(_LOAD, 4),
        _instruction(_EQUAL, _ARCHITECTURES[machine], 1, 0),
        _instruction(_RETURN, _KILL),
    ]
    code.append(_instruction(_LOAD, 0))
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _X32_BIT, 0, 1), _instruction(_RETURN, _KILL)]
    for number in ALWAYS[machine].values():
        code += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _ALLOW)]
    for name, number in SOMETIMES[machine].items():
        if name == "clone3":
            # Its flags lie in memory, which a filter cannot read. ENOSYS makes libc use clone.
            code += [_instruction(_EQUAL, number, 0, 1), _instruction(_RETURN, _MISSING)]
            continue
        block = [line for check in CHECKS[name] for line in _assemble_check(check)]
        code += [
            _instruction(_EQUAL, number, 0, len(block) + 1),
            *block,
            _instruction(_RETURN, _ALLOW),
        ]
    code.append(_instruction(_RETURN, _REFUSE))
    return b"".join(code)


def _assemble_check(check: Check) -> list[bytes]:
    """Return instructions that continue after the last one if the argument has an allowed value.

    Otherwise they refuse or pretend the call.
    """
    low, high = 16 + 8 * check.index, 20 + 8 * check.index  # both machines are little endian
    code = (
        [_instruction(_LOAD, high), _instruction(_EQUAL, 0, 1, 0), _instruction(_RETURN, _REFUSE)]
        if check.wide
        else []
    )
    code.append(_instruction(_LOAD, low))
    if check.mask != 0xFFFFFFFF:
        code.append(_instruction(_AND, check.mask))
    for value in check.pretended:
        code += [_instruction(_EQUAL, value, 0, 1), _instruction(_RETURN, _PRETEND)]
    num_left = len(check.values)
    for value in check.values:  # a match jumps over the remaining values and the refusal
        code.append(_instruction(_EQUAL, value, num_left, 0))
        num_left -= 1
    return [*code, _instruction(_RETURN, _REFUSE)]


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, operand)


def install(code: bytes, pid: int) -> None:
    """Apply the filter permanently to this thread and the threads that it starts.

    Args:
        code: Filter from `assemble`.
        pid: Process id that replaces OWN_PID in the filter.

    Raises:
        OSError: The kernel refuses the filter.
    """
    code = code.replace(struct.pack("=I", OWN_PID), struct.pack("=I", pid))
    program = _Filter(len(code) // 8, code)
    prctl(PR_SET_NO_NEW_PRIVS, 1)
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
