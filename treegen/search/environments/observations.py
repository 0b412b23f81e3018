"""Observations of environments: their checks, their JSON form, and the keys of equal calls."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from treegen.errors import WorldError
from treegen.prompts.replies.types import ToolCall
from treegen.search.environments.protocol import Observation


def call_key(call: ToolCall) -> str:
    """Return a text that equal calls share."""
    return json.dumps([call.name, call.arguments], sort_keys=True, ensure_ascii=False)


def check_observation(shown: object) -> None:
    """Raise WorldError unless a value is an observation that can be used."""
    if not isinstance(shown, Observation):
        raise WorldError(f"the environment returned {shown!r:.80}, which is not an Observation")
    wrong = [
        name
        for name, kinds in _KINDS.items()
        if not isinstance(getattr(shown, name), kinds)
        or (isinstance(getattr(shown, name), bool) and bool not in kinds)
    ]
    if not wrong and shown.reward is not None and not math.isfinite(shown.reward):
        wrong = ["reward"]
    if wrong:
        value = getattr(shown, wrong[0])
        raise WorldError(
            f"the environment returned an Observation whose {wrong[0]} is {value!r:.80}"
        )


_KINDS: Final[dict[str, tuple[type, ...]]] = {
    "text": (str,),
    "images": (tuple, list),
    "exit_status": (int, type(None)),
    "reward": (int, float, type(None)),
    "is_done": (bool,),
    "failure": (str,),
}


def describe_failure(error: Exception) -> str:
    """Return an error of an environment in one line, which is not empty."""
    text = " ".join(str(error).split())
    is_plain = text and isinstance(error, WorldError)
    return text if is_plain else f"{type(error).__name__}: {text}".rstrip(": ")


def observation_json(shown: Observation) -> dict[str, Any]:
    """Return an observation as a JSON object, without fields that are empty."""
    record: dict[str, Any] = {"text": shown.text}
    if shown.images:
        record["num_images"] = len(shown.images)
    for name in ("exit_status", "reward"):
        if (value := getattr(shown, name)) is not None:
            record[name] = value
    for name in ("is_done", "failure"):
        if value := getattr(shown, name):
            record[name] = value
    return record
