"""Sampling parameters recommended by a checkpoint's generation_config.json."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from treegen.errors import InputError, Message, ModelWarning, arg

if TYPE_CHECKING:
    from treegen.common.params import SamplingParams
    from treegen.common.spec import ModelSpec

WAYS: Final = ("recommended", "task")
USER, CHECKPOINT, TASK = "user", "checkpoint", "task"


def load_recommended(way: object, choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sampling parameters that a checkpoint recommends, if a user wants them.

    Args:
        way: One of WAYS, or None.
        choices: The user's other choices, including the model.

    Raises:
        InputError: the way is not known, or the checkpoint recommends nothing.
        ModelError: there is no such checkpoint, or its recommendation cannot be used.
    """
    if way not in (None, *WAYS):
        raise InputError(f"{arg('sampling_from')} must be {' or '.join(WAYS)}, got {way!r}")
    if way != "recommended" or not choices.get("model"):
        return {}
    from treegen.model.checkpoint.files import locate
    from treegen.model.checkpoint.generation_config import (
        difference_from_generate,
        recommended_sampling,
    )

    directory = locate(choices["model"], choices.get("revision"), weights=False)
    recommended = recommended_sampling(directory)
    if not recommended:
        raise InputError(
            f"{choices['model']} has no generation_config.json with sampling settings; remove "
            f"{arg('sampling_from=')}, or pass {arg('temperature=')} and other sampling settings"
        )
    if note := difference_from_generate(directory):
        warnings.warn(note, ModelWarning, stacklevel=2)
    return dict(recommended)


def sources_of(
    names: Collection[str],
    user_choices: Collection[str],
    recommended: Collection[str],
    stored: Mapping[str, Any] | None,
) -> dict[str, str]:
    """Return who chose each sampling parameter: the user, the checkpoint or the task.

    Args:
        names: Names of the sampling parameters.
        user_choices: Names of the parameters that the user chose.
        recommended: Names of the parameters that the checkpoint recommends.
        stored: The choices of the run that is resumed; None for a new run. An old run does not
            record its sources, so parameters without a known source are left out.
    """
    chosen = (stored or {}).get("sources", {})
    sources: dict[str, str] = {}
    for name in names:
        if name in user_choices:
            sources[name] = USER
        elif name in recommended:
            sources[name] = CHECKPOINT
        elif stored is None or name in chosen:
            sources[name] = chosen.get(name, TASK)
    return sources


def advice(sampling: SamplingParams, spec: ModelSpec) -> Message | None:
    """Return a hint if the sampling differs from the checkpoint's recommendation, else None."""
    if all(getattr(sampling, name) == value for name, value in spec.recommended):
        return None
    values = ", ".join(arg(f"{name}={value:g}") for name, value in spec.recommended)
    return Message(
        f"the checkpoint recommends {values}; pass {arg('sampling_from', 'recommended')} to use "
        "these settings"
    )
