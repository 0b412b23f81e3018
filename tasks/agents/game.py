"""Base class of worlds that are Python objects: tools are methods, and copies are forks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Observation


class MoveError(Exception):
    """A move is impossible; the message is for the model."""


class ToolGame(ABC):
    """A world in memory. The tool NAME is the method `do_NAME`, which returns a text.

    The method raises `MoveError` if the move is impossible. `copy.deepcopy` forks the game.
    """

    tools: ClassVar[Sequence[dict[str, Any]]]
    """The tools, as JSON schemas in OpenAI's format."""
    pure_tools: ClassVar[frozenset[str]]
    """Tools that change nothing."""

    @property
    @abstractmethod
    def reward(self) -> float:
        """The game's judgement of its state, from 0 to 1."""

    @property
    @abstractmethod
    def is_done(self) -> bool:
        """Whether the episode is over."""

    @abstractmethod
    def describe(self) -> str:
        """Return the text of the state for the model."""

    def run(self, action: ToolCall) -> Observation:
        """Run an action and return what it shows; a wrong action is an observation."""
        if self.is_done:
            return self._show("The episode is over.")
        wrong = self._explain_wrong(action)
        if wrong is None:
            try:
                return self._show(getattr(self, f"do_{action.name}")(**action.arguments))
            except MoveError as error:
                wrong = str(error)
        return self._show(wrong)

    def observe(self) -> Observation:
        """Return the observation of the state; nothing changes."""
        return self._show(self.describe())

    def _show(self, text: str) -> Observation:
        return Observation(text=text, reward=self.reward, is_done=self.is_done)

    def _explain_wrong(self, action: ToolCall) -> str | None:
        """Return what is wrong with the form of a call; None if nothing is."""
        names = {tool["function"]["name"]: tool["function"]["parameters"] for tool in self.tools}
        if action.name not in names:
            return f"There is no tool {action.name!r}; use {', '.join(names)}."
        parameters = list(names[action.name]["properties"])
        if set(action.arguments) != set(parameters):
            passed = ", ".join(map(str, action.arguments)) or "none"
            return f"{action.name} takes {', '.join(parameters) or 'no arguments'}; got {passed}."
        for name, value in action.arguments.items():
            if not isinstance(value, str):
                return f"{name} must be a string, got {type(value).__name__}."
        return None
