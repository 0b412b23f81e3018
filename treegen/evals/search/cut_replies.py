"""Finds searches of agents in which each branch ended because its reply was cut off."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from treegen.errors import Message, arg

_REMEDIES: Final = {
    "max_tokens": f"raise {arg('max_tokens=')}",
    "budget": f"raise {arg('budget=')}",
    "context": f"lower {arg('depth=')}, or use a model with a longer context",
}


def find_cut(record: Mapping[str, Any], max_tokens: int) -> str | None:
    """Return what cut off the last reply of each branch; None if a branch ended otherwise.

    Args:
        record: The record of a search.
        max_tokens: The longest reply that the run allows.

    Returns:
        "max_tokens", "budget", "context" (the model's), or None.
    """
    leaves = [node for node in record["nodes"] if node["leaf"] and node["parent_id"] is not None]
    if not leaves or not all(map(_is_cut, leaves)):
        return None
    if any(node["n_tokens"] >= max_tokens for node in leaves):
        return "max_tokens"
    return "budget" if "budget" in record["stopped"] else "context"


def _is_cut(node: Mapping[str, Any]) -> bool:
    step = node.get("data")
    has_failed = isinstance(step, dict) and step.get("end") == "failed"
    return has_failed and node["finish_reason"] == "length"


def describe_cuts(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the searches of a run that were cut off, each with a remedy.

    Args:
        results: The content of results.json.
    """
    for limit, num in results.get("cut_off", {}).items():
        yield Message(
            f"{results['method']}: in {num:,} of {results['done']:,} searches, every branch ended "
            f"because its reply was cut off; {_REMEDIES[limit]}"
        )
