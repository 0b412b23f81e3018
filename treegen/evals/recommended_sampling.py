"""Sampling as a checkpoint recommends it: taken for an evaluation, or only mentioned."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import InputError, ModelWarning

if TYPE_CHECKING:
    from treegen.common.params import SamplingParams
    from treegen.common.spec import ModelSpec

WAYS: Final = ("recommended", "task")
USER, CHECKPOINT, TASK = "user", "checkpoint", "task"


def load_recommended(way: object, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a checkpoint recommends, if a user wants them.

    Args:
        way: One of WAYS, or None.
        given: The user's other choices, the model among them.

    Raises:
        InputError: the way is not known, or the checkpoint recommends nothing.
        ModelError: there is no such checkpoint, or what it recommends cannot be used.
    """
    if way not in (None, *WAYS):
        raise InputError(f"sampling_from must be {' or '.join(WAYS)}, got {way!r}")
    if way != "recommended" or not given.get("model"):
        return {}
    from treegen.model.checkpoint.files import locate
    from treegen.model.generation_config import difference_from_generate, recommended_sampling

    directory = locate(given["model"], given.get("revision"), weights=False)
    found = recommended_sampling(directory)
    if not found:
        raise InputError(
            f"{given['model']} recommends no sampling in a generation_config.json; leave out "
            "sampling_from=, or give temperature= and others yourself"
        )
    if note := difference_from_generate(directory):
        warnings.warn(note, ModelWarning, stacklevel=2)
    return dict(found)


def sources_of(
    names: Collection[str],
    asked: Collection[str],
    recommended: Collection[str],
    stored: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Who chose each of some sampling parameters: the user, the checkpoint or the task.

    Args:
        stored: The choices of the run that is resumed; those of an old run say nothing of it.
    """
    chosen = (stored or {}).get("sources", {})
    found: dict[str, str] = {}
    for name in names:
        if name in asked:
            found[name] = USER
        elif name in recommended:
            found[name] = CHECKPOINT
        elif stored is None or name in chosen:
            found[name] = chosen.get(name, TASK)
    return found


def advice(sampling: SamplingParams, spec: ModelSpec) -> str | None:
    """A line for a user whose sampling is not what the checkpoint recommends; None if it is."""
    if all(getattr(sampling, name) == value for name, value in spec.recommended):
        return None
    told = ", ".join(f"{name}={value:g}" for name, value in spec.recommended)
    return f"the checkpoint recommends {told}; sampling_from='recommended' takes it"
