"""Processes of this machine: who has started whom, and who is still there."""

from pathlib import Path

Process = tuple[int, int]
"""A process id, and when it started; ids are used again."""


def living() -> dict[Process, str]:
    """All processes that have not ended, with what they call themselves."""
    return {process: name for process, (name, _) in _table().items()}


def descendants(pid: int) -> dict[Process, str]:
    """Processes that a process has started, those that they have, and so on; not itself."""
    table = _table()
    found: dict[Process, str] = {}
    new = {pid}
    while new:
        below = {
            each: name
            for each, (name, parent) in table.items()
            if parent in new and each not in found
        }
        found |= below
        new = {number for number, _ in below}
    return found


def _table() -> dict[Process, tuple[str, int]]:
    """Processes with their names and their parents."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            name = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended meanwhile
        if stat[0] != "Z":
            found[int(folder.name), int(stat[19])] = (name, int(stat[1]))
    return found
