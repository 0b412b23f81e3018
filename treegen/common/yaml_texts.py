"""YAML of other people, read with limits.

With aliases, a few lines can stand for billions of values, and a text may be nested more deeply
than Python can follow. `check_yaml` detects both before any value is made.
"""

from __future__ import annotations

import re
from typing import Any, Final

MAX_YAML_BYTES: Final = 1_000_000
"""Maximum bytes of a YAML file."""
_MAX_DEPTH: Final = 100
_MAX_CHARS: Final = 10_000_000  # with each alias replaced by its value
_LONG_NUMBER: Final = re.compile(
    r"(?=.*[0-9])[-+.:_0-9]{1000,}"
)  # its conversion takes quadratic time
# Raised by yaml for texts such as `!!int ""`, or a date that does not exist.
_RAISED: Final = (ValueError, LookupError, TypeError, AttributeError, RecursionError)


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text.

    Raises:
        ValueError: The text is not valid YAML, or exceeds a limit. The message is one line.
    """
    import yaml

    try:
        check_yaml(text)
        return yaml.safe_load(text)
    except (yaml.YAMLError, *_RAISED) as error:
        raise ValueError(" ".join(str(error).split())[:500] or type(error).__name__) from None


def check_yaml(text: str) -> None:
    """Check that the values of a YAML text are not nested too deeply and not too large.

    Raises:
        ValueError: They are, or a value contains itself.
        yaml.YAMLError: The text is not valid YAML.
    """
    import yaml

    sizes: dict[str | None, int] = {}  # characters of the value of each anchor
    parents: list[tuple[str | None, int]] = []  # of open collections: anchor, characters before
    num_chars = 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        before, anchor = num_chars, getattr(event, "anchor", None)
        if isinstance(event, yaml.AliasEvent):
            if anchor not in sizes and any(anchor == parent for parent, _ in parents):
                raise ValueError(f"the value of {anchor!r:.60} contains itself")
            num_chars += sizes.get(anchor, 0)
        elif isinstance(event, yaml.CollectionStartEvent):
            if len(parents) == _MAX_DEPTH:
                raise ValueError(f"values are nested more than {_MAX_DEPTH} levels deep")
            parents.append((anchor, before))
            sizes.pop(anchor, None)
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = parents.pop()
        elif isinstance(event, yaml.ScalarEvent):
            is_text = event.implicit == (False, True)  # quoted, without a tag
            if not is_text and _LONG_NUMBER.fullmatch(event.value):
                raise ValueError("a number has more than 1,000 digits")
            num_chars += len(event.value)
        num_chars += 1
        if anchor is not None and not isinstance(event, yaml.CollectionStartEvent):
            sizes[anchor] = num_chars - before
        if num_chars > _MAX_CHARS:
            raise ValueError(f"with aliases, values have more than {_MAX_CHARS:,} characters")
