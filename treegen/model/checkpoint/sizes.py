"""Compare the sizes that a model's description claims with those of its weights."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from treegen.errors import ModelError

SLACK: Final = 4
"""Maximum ratio of declared to numbered layers; above 1, because some layers share weights."""


@dataclass
class Stored:
    """The sizes that the stored weights of a model show."""

    most: int = 0
    """The largest dimension of any tensor."""
    numbers: set[str] = field(default_factory=set)
    """The numbers in tensor names, such as those of layers."""

    def add(self, name: str, shape: Sequence[int]) -> None:
        """Take a tensor into account.

        Args:
            name: The name of the tensor.
            shape: Its shape.
        """
        self.most = max([self.most, *shape])
        self.numbers.update(re.findall(r"\.(\d+)\.", name))


def check_sizes(
    file: Path,
    weights_name: str,
    stored: Stored,
    widths: Mapping[str, object],
    depths: Mapping[str, object],
    packed: int = 1,
) -> None:
    """Raise ModelError for a description with sizes that no stored weight has.

    Args:
        file: The file with the description, for the message.
        weights_name: What the message calls the weights.
        stored: The sizes of the weights.
        widths: Row or column counts by name; values that are not integers are ignored.
        depths: Numbers of layers by name; values that are not integers are ignored.
        packed: Maximum numbers packed into one stored value.
    """
    for name, size in widths.items():
        if isinstance(size, int) and size > stored.most * packed:
            raise _other_model(
                file, weights_name, name, size, f"have at most {stored.most:,} rows or columns"
            )
    for name, size in depths.items():
        if isinstance(size, int) and size > SLACK * max(1, len(stored.numbers)):
            raise _other_model(
                file, weights_name, name, size, f"are numbered up to {len(stored.numbers):,}"
            )


def _other_model(file: Path, weights_name: str, name: str, size: int, sizes: str) -> ModelError:
    return ModelError(
        f"{file} says {name} {size:,}, and {weights_name} {sizes}; "
        "they are not of one model; download both"
    )
