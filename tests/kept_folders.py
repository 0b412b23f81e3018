"""Folders that tests of one process share."""

import atexit
import os
import shutil
from pathlib import Path
from tempfile import mkdtemp


def make_kept_folder() -> Path:
    """Return a new folder that is removed when this process ends, not when a fork of it does."""
    path, process = Path(mkdtemp(prefix="treegen-tests-")), os.getpid()

    def remove() -> None:
        if os.getpid() == process:
            shutil.rmtree(path)

    atexit.register(remove)
    return path
