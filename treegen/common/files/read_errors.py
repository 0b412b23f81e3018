"""Messages about files that cannot be read, with advice."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from treegen.common.files.regular_files import NotRegularError
from treegen.common.spelling import did_you_mean

# Limits the listing of a very large folder that is searched for a similar name.
_MOST_NAMES = 10_000


def describe_read_error(path: Path | str, error: OSError) -> str:
    """Return one line: which file cannot be read, why, and what to do."""
    path = Path(path)
    match error:
        case FileNotFoundError():
            return f"{path} does not exist{_like(path)}"
        case IsADirectoryError():
            return f"cannot read {path}: it is a folder; name a file in it{_such_as(path)}"
        case NotADirectoryError():
            return f"cannot read {path}: a part of the path is a file; check the path"
        case NotRegularError():
            return (
                f"cannot read {path}: it is no regular file but a pipe or device, which may never "
                "end; save its content in a file and name that"
            )
        case PermissionError():
            return f"cannot read {path}: permission denied; let your user read it (chmod u+r)"
        case _:
            why = error.strerror or str(error) or type(error).__name__
            return f"cannot read {path}: {why}; check the disk, or copy the file again"


def _like(path: Path) -> str:
    """Return a hint: the closest names in the file's folder, or the missing part of the path."""
    for above in path.parents:
        if above.is_dir():
            break
    missing = path.relative_to(above).parts[0]
    hint = did_you_mean(missing, _names(above))
    if missing != path.name:
        return f": there is no {above / missing}{hint or '; check the path'}"
    return hint or "; check the path"


def _such_as(path: Path) -> str:
    first = min((name for name in _names(path) if not name.startswith(".")), default="")
    return f", such as {first}" if first else ""


def _names(folder: Path) -> Iterable[str]:
    try:
        return [each.name for each in islice(folder.iterdir(), _MOST_NAMES)]
    except OSError:
        return []
