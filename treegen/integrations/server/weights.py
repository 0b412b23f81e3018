"""New weights for the model, from checkpoints below one folder."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from treegen.common.checks import CacheMode
from treegen.errors import InputError, ModelError
from treegen.integrations.server.errors import run_exclusively
from treegen.integrations.server.requests import RequestError, parse_model
from treegen.llm.async_llm import AsyncLLM


class WeightsRequest(BaseModel):
    """The body of a request for new weights."""

    model_config = ConfigDict(extra="forbid", strict=True)

    path: str
    """The directory of the checkpoint, relative to the server's folder."""
    cache: CacheMode = "all"
    """As in `LLM.update`."""


class WeightUpdater:
    """Loads checkpoints that clients name, one at a time."""

    def __init__(self, served: AsyncLLM, folder: Path) -> None:
        """Set up the updates of one model.

        Args:
            served: The model.
            folder: The folder of all checkpoints.

        Raises:
            InputError: there is no such folder.
        """
        if not folder.is_dir():
            raise InputError(f"{folder} is not a folder; pass a folder that contains checkpoints")
        self._served, self._folder = served, folder.resolve()
        self._lock = asyncio.Lock()

    async def update(self, body: dict[str, Any]) -> dict[str, Any]:
        """Load the weights that a request names, after those of earlier requests.

        If the request is cancelled while it waits, nothing is loaded. If it is cancelled later, the
        next update still waits until this one has ended.

        Returns:
            The JSON of the response.

        Raises:
            RequestError: there is no such checkpoint, or it does not fit the model.
        """
        request = parse_model(WeightsRequest, body)
        return await run_exclusively(self._lock, lambda: self._load(request))

    async def _load(self, request: WeightsRequest) -> dict[str, Any]:
        directory = await asyncio.to_thread(self._find, request.path)
        try:
            version = await self._served.update(directory, cache=request.cache)
        except (InputError, ModelError) as error:
            message = str(error).replace(f"{self._folder}/", "")
            raise RequestError(message, "path") from None
        return {"object": "weights", "path": request.path, "version": version}

    def _find(self, name: str) -> Path:
        """Return a directory below the folder, all of whose files are below the folder too."""
        try:
            directory = (self._folder / name).resolve()
            is_below = directory != self._folder and directory.is_relative_to(self._folder)
            if is_below and directory.is_dir():
                files = [path.resolve() for path in directory.rglob("*")]
                if all(file.is_relative_to(self._folder) for file in files):
                    return directory
        except (OSError, ValueError, RuntimeError):  # a name with a zero byte, or a loop of links
            pass
        raise RequestError(
            f"{name!r:.80} is not a checkpoint in the server's --weights-dir; pass the path of "
            "the checkpoint's directory, relative to --weights-dir",
            "path",
        )
