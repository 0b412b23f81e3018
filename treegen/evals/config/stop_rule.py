"""The rule by which a problem gets no further samples."""

from typing import Final

from treegen.common.checks import check_argument_types
from treegen.errors import InputError, arg

DECIDED: Final = "decided"
NEVER: Final = "never"
_CONFIDENCE: Final = 0.95


@check_argument_types
def parse_stop_rule(rule: str) -> float | None:
    """Return the probability at which a rule such as "decided:0.95" takes a vote as decided.

    "decided" alone is 0.95. None for "never".

    Raises:
        InputError: the rule is invalid.
    """
    if rule == NEVER:
        return None
    name, colon, number = rule.partition(":")
    try:
        chance = float(number) if colon else _CONFIDENCE
    except ValueError:
        chance = -1.0
    if name != DECIDED or not 0.5 < chance < 1:
        raise InputError(
            f"{arg('stop_when')} must be `decided`, `decided:CHANCE` with a chance between 0.5 "
            f"and 1, or `never`; got {rule!r}"
        )
    return chance
