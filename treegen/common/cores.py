"""How many cores this process may use."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


def count_cores(root: Path = Path("/")) -> int:
    """CPU cores that this process may use: its affinity, and a container's share of CPU time.

    A container may see 64 cores and be given the time of two. What starts 64 workers there has
    each of them wait for the others.

    Args:
        root: Where /proc and /sys are.
    """
    count = len(os.sched_getaffinity(0))
    for share in _shares(root):
        count = min(count, max(1, round(share)))
    return count


def _shares(root: Path) -> Iterator[float]:
    """Yield the cores' worth of CPU time that each control group above this process grants."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
            # Inside a container the path may be the host's, and only the top can be seen.
            for place in [group.strip("/"), *map(str, Path(group.strip("/")).parents)]:
                yield from _share(mount / place)


def _share(folder: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()  # "max" is no number
        yield int(quota) / int(period)
    with contextlib.suppress(OSError, ValueError):
        quota, period = (
            (folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")
        )
        if int(quota) > 0:
            yield int(quota) / int(period)
