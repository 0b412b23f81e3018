"""The version of treegen, and the tested versions of torch and transformers.

treegen uses interfaces of these two that may change in any minor version, so pyproject.toml allows
only these minor versions. If others are installed anyway, loading a model warns.
"""

from __future__ import annotations

import re
import sys
import warnings
from functools import cache
from typing import Final

VERSION: Final = "0.1.0"

TESTED: Final = {"torch": ((2, 11), (2, 15)), "transformers": ((5, 17), (5, 24))}
"""The lowest and the highest tested minor version of each package."""


@cache
def warn_untested() -> None:
    """Warn, once per process, about imported versions that the tests have not been run with."""
    problems = [
        f"{name} {version} is installed, but treegen was tested with {name} {_text(lowest)} to "
        f"{_text(highest)}"
        for name, (lowest, highest) in TESTED.items()
        if name in sys.modules
        and not lowest <= _minor(version := sys.modules[name].__version__) <= highest
    ]
    if problems:
        # `import treegen` imports this module before the command line can set its signal handlers.
        from treegen.errors import ModelWarning

        names = " ".join(f"'{tested_versions(name)}'" for name in TESTED)
        warnings.warn(
            f"{'; '.join(problems)}; models may fail to load or compute wrong results; install "
            f"supported versions: pip install {names}",
            ModelWarning,
            stacklevel=3,
        )


def tested_versions(name: str) -> str:
    """Return the versions of a package that treegen was tested with, as a requirement of pip."""
    lowest, highest = TESTED[name]
    return f"{name}>={_text(lowest)},<{_text((highest[0], highest[1] + 1))}"


def _minor(version: str) -> tuple[int, int]:
    """Return the first two numbers of a version."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


def _text(minor: tuple[int, int]) -> str:
    return ".".join(map(str, minor))
