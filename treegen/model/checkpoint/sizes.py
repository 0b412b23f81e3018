"""Compare the sizes that a model's description claims with those of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from treegen.errors import ModelError

SLACK: Final = 4
"""How many times more layers than are numbered a description may name: some share weights."""


@dataclass
class Stored:
    """What the stored weights tell of the sizes of their model.

    most: the largest size of any tensor. numbers: the numbers in the names, such as of layers.
    """

    most: int = 0
    numbers: set[str] = field(default_factory=set)

    def add(self, name: str, shape: Sequence[int]) -> None:
        """Take a tensor into account.

        Args:
            name: The name of the tensor.
            shape: Its sizes.
        """
        self.most = max([self.most, *shape])
        self.numbers.update(re.findall(r"\.(\d+)\.", name))


def check_sizes(
    file: Path,
    beside: str,
    stored: Stored,
    widths: Mapping[str, object],
    depths: Mapping[str, object],
    packed: int = 1,
) -> None:
    """Raise ModelError for a description of sizes that no stored weight has.

    Args:
        file: The description, for the message.
        beside: What the weights are, for the message.
        stored: The sizes of the weights.
        widths: Rows or columns of weights by name; what is no whole number is not looked at.
        depths: Numbers of layers, likewise.
        packed: How many numbers may be stored as one.
    """
    for name, size in widths.items():
        if isinstance(size, int) and size > stored.most * packed:
            raise _other_model(
                file, beside, name, size, f"have at most {stored.most:,} rows or columns"
            )
    for name, size in depths.items():
        if isinstance(size, int) and size > SLACK * max(1, len(stored.numbers)):
            raise _other_model(
                file, beside, name, size, f"are numbered up to {len(stored.numbers):,}"
            )


def _other_model(file: Path, beside: str, name: str, size: int, found: str) -> ModelError:
    return ModelError(
        f"{file} says {name} {size:,}, and {beside} {found}; "
        "they are not of one model; download both"
    )
