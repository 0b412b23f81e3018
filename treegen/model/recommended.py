"""How a checkpoint recommends that its samples are drawn, as generation_config.json says it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from treegen.common.params import MIN_TEMPERATURE, SamplingParams
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.files import read_object

# Settings that vLLM and transformers take from the file too, by names that SamplingParams shares.
NAMES: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "no_repeat_ngram_size",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip
_OF_DRAWS: Final = ("temperature", "top_p", "top_k", "min_p")


def recommended_sampling(directory: Path | None) -> tuple[tuple[str, Any], ...]:
    """The settings that a checkpoint recommends, by the names of SamplingParams; may be none.

    directory: the checkpoint's; None for a model without files.

    A file that says do_sample=false recommends greedy decoding, and one that says do_sample=true
    without a temperature recommends 1, as transformers reads them. A temperature of nearly 0 means
    greedy decoding too.

    Raises:
        ModelError: the file cannot be read, or has a value that cannot be used.
    """
    file = directory / "generation_config.json" if directory else None
    if file is None or not file.is_file():
        return ()
    settings = read_object(file)
    found = {name: settings[name] for name in NAMES if settings.get(name) is not None}
    match settings.get("do_sample"):
        case True:
            found = {"temperature": 1.0, **found}
        case False:
            kept = {name: value for name, value in found.items() if name not in _OF_DRAWS}
            found = {"temperature": 0.0, **kept}
    if found.get("top_k") == -1:  # another way to write that all tokens are kept
        found["top_k"] = 0
    cold = found.get("temperature")
    if isinstance(cold, float) and 0 < cold < MIN_TEMPERATURE:  # another way to write greedy
        found["temperature"] = 0.0
    try:
        SamplingParams(**found)
    except InputError as error:
        raise ModelError(f"{file} recommends what cannot be used: {error}; mend the file") from None
    return tuple(found.items())


def recommendation(settings: dict[str, Any]) -> str:
    """Settings as a line says them, such as "temperature 0.6, top_p 0.95"."""
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())
