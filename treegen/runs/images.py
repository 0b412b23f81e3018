"""The images of a run, stored in its directory, so that it does not need the originals.

    images.json   name and size of each image, and the images of each problem
    images/       the files, once each, named by a hash of their content

A run stores files of up to `MAX_STORED_BYTES` bytes in all; images.json also lists the remaining
images. Run directories may come from other people: links out of the directory are not followed, and
sizes are checked.
"""

import hashlib
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Self

from treegen.common.files import read_regular, sweep, write_atomically
from treegen.errors import RunError
from treegen.runs.files import format_os_error, read_json, write_json

MAX_STORED_BYTES: Final = 2**30
"""Maximum number of bytes of images that a run stores."""
INDEX: Final = "images.json"
FOLDER: Final = "images"
_HASH: Final = re.compile(r"[0-9a-f]{64}")
_SCRATCH: Final = "[0-9a-f]" * 64 + ".[0-9]*.tmp"
_MAX_SIDE: Final = 2**26  # pixels, or tokens; no image that can be opened has more
_MAX_BYTES: Final = 2**26  # bytes of a file; no image that can be opened has more


@dataclass(frozen=True, slots=True)
class RunImage:
    """An image of a run."""

    sha256: str
    """SHA-256 of its file, in hex digits."""
    name: str
    """Its name in the data, or that of its file."""
    size: tuple[int, int]
    """Its width and height in pixels."""
    tokens: int | None = None
    """Its number of tokens in a prompt; None if unknown."""

    def __str__(self) -> str:
        """Return name, size and number of tokens as text."""
        tokens = "" if self.tokens is None else f", {self.tokens:,} tokens"
        return f"{self.name or 'unnamed'}, {self.size[0]:,} x {self.size[1]:,} pixels{tokens}"

    @property
    def document(self) -> dict[str, Any]:
        """The image as a JSON object."""
        width, height = self.size
        return {
            "sha256": self.sha256,
            "name": self.name,
            "width": width,
            "height": height,
            "tokens": self.tokens,
        }


@dataclass(frozen=True, slots=True)
class RunImages:
    """The images of a run."""

    path: Path
    """The run directory."""
    images: Mapping[str, RunImage] = field(default_factory=dict)
    """The images by hash."""
    problems: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By id of the problem, the hashes of its images in order."""

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the images of a run, which may have none.

        Raises:
            RunError: images.json is corrupt.
        """
        index = path / INDEX
        if not os.path.lexists(index):
            return cls(path)
        if index.is_symlink() or not index.is_file():
            raise RunError(
                f"{index} is not a regular file; replace the path with a copy of the file, "
                "or remove the path"
            )
        index_content = read_json(index)
        try:
            images = {entry["sha256"]: _image(entry) for entry in index_content["images"]}
            problems = {
                str(name): tuple(hashes) for name, hashes in index_content["problems"].items()
            }
            if any(sha256 not in images for hashes in problems.values() for sha256 in hashes):
                raise ValueError("a problem refers to an image that is not listed in `images`")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{index} is corrupt ({error}); restore the file from a copy, or remove the "
                "file and resume the run on the machine that has the original images"
            ) from None
        return cls(path, images, problems)

    def of(self, problem_id: str) -> tuple[RunImage, ...]:
        """Return the images of a problem, in its order."""
        return tuple(self.images[sha256] for sha256 in self.problems.get(problem_id, ()))

    def file(self, sha256: str) -> Path | None:
        """Return the file of a stored image; None if the image is not stored."""
        if (self.path / FOLDER).is_symlink():
            return None
        file = self.path / FOLDER / sha256
        return file if file.is_file() else None

    def content(self, sha256: str) -> bytes | None:
        """Return the content of an image's file; None if the image is not stored.

        Raises:
            RunError: the file cannot be read, or its content has changed.
        """
        if (file := self.file(sha256)) is None:
            return None
        try:
            data = read_regular(file, _MAX_BYTES)
        except OSError as error:
            raise RunError(f"cannot read {file}: {format_os_error(error)}") from error
        if data is None or hashlib.sha256(data).hexdigest() != sha256:
            raise RunError(
                f"{file} is corrupt; restore the file from a copy, or remove the file and "
                "resume the run on the machine that has the original image"
            )
        return data

    @property
    def num_left_out(self) -> int:
        """Number of images that are not stored."""
        return sum(self.file(sha256) is None for sha256 in self.images)


def keep_images(
    path: Path,
    problems: Mapping[str, Sequence[RunImage]],
    content: Callable[[str], bytes | None],
    max_bytes: int = MAX_STORED_BYTES,
) -> None:
    """Store the images of a run. Stored images are not written again.

    Args:
        path: The run directory.
        problems: The images of each problem, by its id.
        content: Returns the content of an image's file by its hash; None leaves the image out.
        max_bytes: Maximum number of bytes in all. An image that would exceed them is left out.

    Raises:
        RunError: the system refused a write, or the folder is a link. Images stored by then are
            whole, and the next call continues from there.
    """
    images = {
        image.sha256: image for problem_images in problems.values() for image in problem_images
    }
    folder, size = path / FOLDER, 0
    try:
        if folder.is_symlink():
            raise RunError(
                f"cannot store images in {folder}: the folder is a symbolic link that leads out "
                "of the run; replace the link with a folder, or remove the link"
            )
        folder.mkdir(exist_ok=True)
        sweep(folder, _SCRATCH)
        for name in images:
            file = folder / name
            if file.exists():
                size += file.stat().st_size
                continue
            data = content(name)
            if data is None or size + len(data) > max_bytes:
                continue
            with write_atomically(file, folder / f"{name}.{os.getpid()}.tmp") as scratch:
                scratch.write(data)
            size += len(data)
    except OSError as error:
        raise RunError(
            f"cannot store images in {folder}: {format_os_error(error)}; free some disk space"
        ) from error
    # Written last, so that a reader of images.json finds all files that it lists.
    document = {
        "images": [image.document for image in images.values()],
        "problems": {
            name: [image.sha256 for image in problem_images]
            for name, problem_images in problems.items()
        },
    }
    write_json(path / INDEX, document)


def _image(entry: Mapping[str, Any]) -> RunImage:
    sha256, tokens = str(entry["sha256"]), entry["tokens"]
    if not _HASH.fullmatch(sha256):  # it becomes a part of a path
        raise ValueError(f"{sha256!r:.80} is not a SHA-256 hash")
    size = _check_number(entry["width"]), _check_number(entry["height"])
    return RunImage(
        sha256, str(entry["name"]), size, None if tokens is None else _check_number(tokens)
    )


def _check_number(value: object) -> int:
    if type(value) is not int or not 0 < value <= _MAX_SIDE:  # true is an int too
        raise ValueError(
            f"the number of pixels or tokens must be an integer from 1 to {_MAX_SIDE}, got "
            f"{value!r:.80}"
        )
    return value
