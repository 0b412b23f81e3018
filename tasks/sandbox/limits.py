"""Limits on one run of a program."""

from __future__ import annotations

from dataclasses import dataclass

from treegen.errors import InputError

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one run of a program. The first one reached decides the verdict.

    Raises:
        InputError: A limit is too low.
    """

    cpu_seconds: float = 4.0
    """Seconds of CPU time. The verdict `timeout` depends on it, so scores do not depend on load."""
    wall_seconds: float | None = None
    """A safety net against programs that wait; by default three times the CPU time."""
    memory: int = 1024 * MIB
    """Bytes of address space. The interpreter itself takes about 50 MiB."""
    output: int = MIB
    """Bytes of stdout, or of the JSON of a returned value, in addition to four times the length of
    the expected answer. On stderr 64 times as many are allowed; only the end is kept."""
    threads: int = 64
    """Threads at once."""
    scratch: int = 16 * MIB
    """Bytes in the scratch directory."""
    files: int = 256
    """Files in the scratch directory."""
    open_files: int = 64
    """Open files at once."""

    def __post_init__(self) -> None:
        for name in ("cpu_seconds", "output", "threads", "scratch", "files"):
            if getattr(self, name) <= 0:
                raise InputError(f"{name} must be more than 0, got {getattr(self, name)}")
        if self.wall_seconds is not None and self.wall_seconds < self.cpu_seconds:
            raise InputError(
                f"wall_seconds must be at least cpu_seconds ({self.cpu_seconds:g}), "
                f"got {self.wall_seconds:g}"
            )
        if self.memory < 64 * MIB:
            raise InputError(f"memory must be at least 64 MiB, got {self.memory} bytes")
        if self.open_files < 16:
            raise InputError(f"open_files must be at least 16, got {self.open_files}")

    @property
    def wall(self) -> float:
        """Wall seconds after which a program is killed."""
        return 3 * self.cpu_seconds if self.wall_seconds is None else self.wall_seconds
