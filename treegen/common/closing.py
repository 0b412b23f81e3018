"""What a `with` block closes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self


class Closing(ABC):
    """Is closed at the end of its `with` block."""

    @abstractmethod
    def close(self) -> None:
        """End it and free what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
