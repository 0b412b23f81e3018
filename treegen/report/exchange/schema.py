"""Checks the content of other tools' logs with pydantic schemas.

A log is untrusted. Every field that is used has a type and bounds, nothing is converted (1.7 is not
a document number, and "no" is not true), and an error names the file, the line or sample, and the
field.
"""

from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from treegen.errors import InputError

MOST_SAMPLES: Final = 1_000_000
"""The largest number of samples of a problem in a log, or of its epochs."""
_MOST_COUNT: Final = 2**53


def _is_time(text: str) -> str:
    datetime.fromisoformat(text)
    return text


Count = Annotated[int, Field(ge=0, le=_MOST_COUNT)]
Index = Annotated[int, Field(ge=0, lt=MOST_SAMPLES)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=500)]
Time = Annotated[str, AfterValidator(_is_time)]


class Schema(BaseModel):
    """A part of a log; only the fields that are declared here are checked."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


_Kind = TypeVar("_Kind", bound=Schema)


def validate(kind: type[_Kind], found: Any, where: str) -> _Kind:
    """Return a part of a log after checking it.

    Args:
        kind: The schema of the part.
        found: The value in the log.
        where: The file, and the line or sample, for the message.

    Raises:
        InputError: A field is missing, has another type or is out of its bounds.
    """
    if not isinstance(found, Mapping):
        raise InputError(f"{where} must be a JSON object, got {found!r:.60}; mend or remove it")
    try:
        return kind.model_validate(dict(found))
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        place = ".".join(map(str, first["loc"]))
        got = "" if first["type"] == "missing" else f", got {first['input']!r:.60}"
        more = f" ({len(others)} more faults)" if others else ""
        message = first["msg"][:1].lower() + first["msg"][1:]
        raise InputError(
            f"{where}: {place or 'it'}: {message}{got}{more}; mend or remove it"
        ) from None
