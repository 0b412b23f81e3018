"""Counts the cores that this process may use."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final


def count_cores(root: Path = Path("/")) -> int:
    """Return the CPU cores that this process may use: its affinity, and its container's CPU quota.

    A container may see 64 cores and have a quota of two. With 64 workers there, each would wait for
    the others.

    Args:
        root: Folder that contains proc and sys.
    """
    count = len(os.sched_getaffinity(0))
    for share in _shares(root):
        count = min(count, max(1, round(share)))
    return count


def _shares(root: Path) -> Iterator[float]:
    """Yield the quota, in cores, of each control group above this process."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            # Inside a container the path may be the host's, of which only the top is visible.
            for path in [group.strip("/"), *map(str, Path(group.strip("/")).parents)]:
                yield from _share(mount / path)


def _share(folder: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()  # int("max") raises ValueError
        yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = (
            (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
        )
        if int(quota) > 0:
            yield int(quota) / int(period)


def count_idle_cores(root: Path = Path("/"), seconds: float = 0.2) -> int:
    """Return the physical cores that this process may use and nobody else uses now, at least 1.

    Threads of a program that computes all the time wait for each other at the end of each operator,
    so one thread on a core that others use slows all of them down.

    Args:
        root: Folder that contains proc and sys.
        seconds: For how long to measure.
    """
    cores = sorted(os.sched_getaffinity(0))
    siblings = {_read_siblings(root, core) for core in cores}
    physical = min(len(siblings), count_cores(root))
    before = _read_times(root)
    time.sleep(seconds)
    after = _read_times(root)
    shares = []
    for core in cores:
        if core in before and core in after:
            idle, total = (b - a for a, b in zip(before[core], after[core], strict=True))
            shares.append(idle / total if total > 0 else 1.0)
    if not shares:
        return physical
    return max(1, min(physical, round(sum(shares) / len(shares) * len(siblings))))


def _read_siblings(root: Path, core: int) -> str:
    """Return the logical cores that share a physical core with this one, as the kernel does."""
    folder = root / f"sys/devices/system/cpu/cpu{core}/topology"
    with contextlib.suppress(OSError):
        return (folder / "thread_siblings_list").read_text().strip()
    return str(core)


def _read_times(root: Path) -> dict[int, tuple[int, int]]:
    """Return the idle time and the whole time of each logical core, in the kernel's ticks."""
    times = {}
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/stat").read_text().splitlines():
            name, *numbers = line.split()
            if name.startswith("cpu") and name[3:].isdigit():
                ticks = [int(number) for number in numbers[:8]]
                times[int(name[3:])] = ticks[3] + ticks[4], sum(ticks)
    return times


_has_chosen: Final = threading.Event()  # set once this process has chosen a number of threads


def set_threads(stored: str | None = None) -> int:
    """Let torch compute on the idle physical cores, once for a process; return the number.

    A number that the user has set, by OMP_NUM_THREADS or MKL_NUM_THREADS or in torch, stays.

    Args:
        stored: The number that a resumed run was computed with. Sums in float32 depend on it.
    """
    import torch

    is_default = torch.get_num_threads() in (
        os.cpu_count(),
        (os.cpu_count() or 2) // 2,
        count_cores(),
    )
    by_user = any(os.environ.get(name) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"))
    if not by_user and is_default and not _has_chosen.is_set():
        is_number = stored is not None and stored.isdecimal() and 0 < int(stored) <= 1024
        torch.set_num_threads(int(stored or 1) if is_number else count_idle_cores())
        _has_chosen.set()
    return torch.get_num_threads()
