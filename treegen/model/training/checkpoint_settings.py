"""Compare the settings of new weights with those of a model."""

from __future__ import annotations

import math
from typing import Any, Final

from treegen.errors import InputError
from treegen.model.model import Model

_NEUTRAL: Final = (
    *("architectures", "dtype", "torch_dtype", "transformers_version", "quantization_config"),
    *("use_cache", "initializer_range", "tie_word_embeddings", "router_aux_loss_coef"),
)
"""Settings that do not decide what its layers compute from the weights."""


def check_settings(model: Model, config: Any, name: str) -> None:
    """Check that new weights have the settings of a model, because an update changes only weights.

    Args:
        model: The model.
        config: The configuration of the checkpoint or module that has the new weights.
        name: Its name in messages.

    Raises:
        InputError: a setting that decides what layers compute differs.
    """
    own, new = (
        _settings_of(each.get_text_config(decoder=True).to_dict())
        for each in (model.module.config, config)
    )
    for key in ("model_type", *sorted(own)):  # other keys are those of other tools
        if not _is_same(own.get(key), new.get(key)):
            raise InputError(
                f"{name} has {key} {new.get(key)!r:.60}, but the model has "
                f"{own.get(key)!r:.60}; pass weights of the same model, or pass only named "
                "tensors to keep the model's settings"
            )


def _settings_of(values: Any) -> Any:
    """Return the settings, at any depth, that decide what layers compute from their weights."""
    if not isinstance(values, dict):
        return values
    return {
        name: _settings_of(value)
        for name, value in values.items()
        if name not in _NEUTRAL
        and not str(name).startswith(("_", "output_"))
        and not str(name).endswith("_token_id")
        and "drop" not in str(name)
    }


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two settings are equal. GGUF files store numbers in float32."""
    if isinstance(one, dict) and isinstance(other, dict):
        return all(_is_same(one.get(name), other.get(name)) for name in {*one, *other})
    if isinstance(one, float) and isinstance(other, int | float):
        return math.isclose(one, other, rel_tol=1e-6)
    return bool(one == other)
