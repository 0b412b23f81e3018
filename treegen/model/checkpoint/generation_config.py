"""Sampling parameters that a checkpoint recommends in its generation_config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from treegen.common.params import MIN_TEMPERATURE, SamplingParams
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.files import read_object

_FILE: Final = "generation_config.json"
# Settings that vLLM and transformers also read from the file; SamplingParams has the same names.
NAMES: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "no_repeat_ngram_size",
    "presence_penalty",
    "frequency_penalty",
)
_SAMPLING_ONLY: Final = ("temperature", "top_p", "top_k", "min_p")  # no effect on greedy decoding


# Other settings that change the samples of `generate`, with their neutral values.
_IGNORED: Final[dict[str, tuple[Any, ...]]] = {
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "top_h": (),
    "sequence_bias": (),
    "bad_words_ids": ([],),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "exponential_decay_length_penalty": (),
    "encoder_repetition_penalty": (1,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "num_beams": (1,),
    "penalty_alpha": (0,),
    "watermarking_config": (),
}


def read_settings(directory: Path | None) -> dict[str, Any]:
    """Return the content of generation_config.json; empty without such a file.

    Args:
        directory: The checkpoint's directory; None for a model without files.

    Raises:
        ModelError: the file cannot be read.
    """
    file = directory / _FILE if directory else None
    return read_object(file) if file is not None and file.is_file() else {}


def difference_from_generate(directory: Path | None) -> str:
    """Describe how samples by `recommended_sampling` differ from those of transformers' `generate`.

    Args:
        directory: The checkpoint's directory; None for a model without files.

    Returns:
        One line; empty if there is no difference.

    Raises:
        ModelError: The file cannot be read, or has a value that cannot be used.
    """
    recommended, settings = dict(recommended_sampling(directory)), read_settings(directory)
    if not recommended:
        return ""
    differences = []
    ignored = [
        name
        for name, neutral in _IGNORED.items()
        if settings.get(name) is not None and settings[name] not in neutral
    ]
    if ignored:
        differences.append(f"treegen ignores {', '.join(ignored)}")
    if settings.get("do_sample") is None and recommended.get("temperature"):
        differences.append("without do_sample, transformers decodes greedily")
    elif recommended.get("temperature") and "top_k" not in recommended:
        differences.append(
            "without top_k, transformers keeps the 50 most likely tokens, but treegen keeps all"
        )
    if not differences:
        return ""
    return (
        "generation_config.json is applied differently than in transformers' generate: "
        f"{'; '.join(differences)}"
    )


def recommended_sampling(directory: Path | None) -> tuple[tuple[str, Any], ...]:
    """Return the settings that a checkpoint recommends, by names of SamplingParams; may be empty.

    As in transformers, a file with do_sample=false recommends greedy decoding, and one with
    do_sample=true and no temperature recommends temperature 1. A temperature of nearly 0 also means
    greedy decoding.

    Args:
        directory: The checkpoint's directory; None for a model without files.

    Raises:
        ModelError: the file cannot be read, or has a value that cannot be used.
    """
    settings = read_settings(directory)
    recommended = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    match settings.get("do_sample"):
        case True:
            recommended = {"temperature": 1.0, **recommended}
        case False:
            remaining = {
                name: value for name, value in recommended.items() if name not in _SAMPLING_ONLY
            }
            recommended = {"temperature": 0.0, **remaining}
    if recommended.get("top_k") == -1:  # means that all tokens are kept
        recommended["top_k"] = 0
    temperature = recommended.get("temperature")
    if (
        isinstance(temperature, float) and 0 < temperature < MIN_TEMPERATURE
    ):  # means greedy decoding
        recommended["temperature"] = 0.0
    try:
        SamplingParams(**recommended)
    except InputError as error:
        raise ModelError(
            f"{directory}/{_FILE} recommends invalid sampling parameters: {error}; fix the file"
        ) from None
    return tuple(recommended.items())


def format_sampling(settings: dict[str, Any]) -> str:
    """Format settings as one line, such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
