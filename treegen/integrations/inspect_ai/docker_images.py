"""Images of docker that snapshots of containers are stored as."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Collection
from typing import Final

from treegen.errors import WorldError

_REPOSITORY: Final = "treegen-snapshot"
_COMPOSE: Final = """\
# bytes: {size}
services:
  default:
    image: {image}
    command: tail -f /dev/null
    init: true
    network_mode: none
    stop_grace_period: 1s
"""


class DockerImages:
    """The images of one run, with a label by which a later process of the run finds them.

    Containers that start from the images have the label too.

    Args:
        run: Text that identifies the run.
    """

    def __init__(self, run: str) -> None:
        name = hashlib.sha256(run.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self._label = f"treegen.run={name}"
        self._filter = f"--filter=label={self._label}"

    async def measure(self, container: str) -> int:
        """Return how many bytes an image of a container adds to that which it started from."""
        size = await _docker("container", "inspect", "--size", "--format={{.SizeRw}}", container)
        try:
            return int(size)
        except ValueError:
            raise WorldError(
                f"expected docker to print the size of a container, got {size!r:.60}"
            ) from None

    async def commit(self, container: str, tag: str) -> None:
        """Store the files of a container as an image."""
        image = f"{_REPOSITORY}:{tag}"
        await _docker("commit", f"--change=LABEL {self._label}", container, image)

    async def tags(self) -> list[str]:
        """Return the tags of all images of the run."""
        listed = await _docker("image", "ls", self._filter, "--format={{.Tag}}", _REPOSITORY)
        return [tag for tag in listed.split() if tag != "<none>"]

    async def remove(self, tag: str) -> None:
        """Remove an image. Containers that started from it go on; other runs' images stay."""
        if tag in await self.tags():
            await _docker("image", "rm", "--force", f"{_REPOSITORY}:{tag}")

    async def prune(self) -> None:
        """Remove images without a tag, which containers that have ended by now had kept."""
        await _docker("image", "prune", "--force", self._filter)

    async def remove_leftovers(self, tags: Collection[str], containers: Collection[str]) -> int:
        """Remove the containers and images of the run, and return how many.

        Args:
            tags: Tags of images that stay.
            containers: Names of containers that stay.
        """
        running = (await _docker("ps", "--all", self._filter, "--format={{.Names}}")).split()
        if leftovers := [name for name in running if name not in containers]:
            await _docker("rm", "--force", "--volumes", *leftovers)
        old = [tag for tag in await self.tags() if tag not in tags]
        for tag in old:
            await self.remove(tag)
        await self.prune()
        return len(leftovers) + len(old)


def compose(tag: str, size: int) -> str:
    """Return the compose file of a container that starts from an image.

    Args:
        tag: Tag of the image.
        size: Bytes of the image, which the file stores.
    """
    return _COMPOSE.format(image=f"{_REPOSITORY}:{tag}", size=size)


def read_size(text: str) -> int:
    """Return the bytes that a compose file stores; -1 if it stores none."""
    number = text.partition("\n")[0].removeprefix("# bytes: ")
    return int(number) if number.isascii() and number.isdigit() else -1


async def _docker(*arguments: str) -> str:
    """Run a command of docker, and return what it prints.

    Raises:
        WorldError: The command fails.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            "docker",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        printed, errors = await process.communicate()
    except OSError as error:
        raise WorldError(f"docker cannot be started: {error}; install Docker") from None
    if process.returncode:
        text = errors.decode("utf-8", "replace").strip()
        raise WorldError(f"docker {arguments[0]} failed: {text[-300:]}; check docker")
    return printed.decode("utf-8", "replace").strip()
