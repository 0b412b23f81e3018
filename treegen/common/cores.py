"""Counts the cores that this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


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
            for place in [group.strip("/"), *map(str, Path(group.strip("/")).parents)]:
                yield from _share(mount / place)


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
