"""The memory of the machine, or of the container in which a process runs."""

import os
from contextlib import suppress
from pathlib import Path


def count_host_bytes() -> int:
    """Return the total bytes of the host's memory, within the container's limit."""
    total: int = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError):  # "max" means no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return total
