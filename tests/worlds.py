"""Using worlds: environments that are closed, and tools that are called by their names."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Environment, Observation, World

E = TypeVar("E", bound=Environment)
T = TypeVar("T")


def use(environment: E, body: Callable[[E], Awaitable[T]]) -> T:
    """Run a coroutine with an environment, and close it."""

    async def run() -> T:
        try:
            return await body(environment)
        finally:
            await environment.close()

    return asyncio.run(run())


async def call(world: World, tool: str, **arguments: Any) -> Observation:
    """Run a tool."""
    return await world.run(ToolCall(tool, arguments))


async def bash(world: World, command: str) -> Observation:
    """Run a command."""
    return await call(world, "bash", command=command)
