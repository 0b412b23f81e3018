"""Ends a process when the process that started it ends, whatever it is doing."""

import os
import threading
import time
from typing import Final

_LOOK: Final = 1.0  # seconds between checks


def exit_with_parent(leader: int) -> None:
    """End this process soon after its leader ends, in whatever way.

    Args:
        leader: Id of the process that started this one.
    """
    threading.Thread(target=_watch, args=(leader,), daemon=True).start()


def _watch(leader: int) -> None:
    while os.getppid() == leader:
        time.sleep(_LOOK)
    os._exit(1)
