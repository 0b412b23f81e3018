"""Which model families cannot be used, and why."""

from typing import Final

from transformers import PretrainedConfig

from treegen.errors import ModelError
from treegen.model.quantized import check_packages, quantisation_of

_OWN_STATE: Final = "its recurrent layers keep their states in themselves, not in a cache"
NO_ATTENTION: Final = "none of its layers attends; treegen is for models with attention layers"
OWN_ATTENTION: Final = "its layers compute attention without transformers' attention interface"
_DROPS: Final = "its layers drop the keyword arguments that carry the batch to attention"

# Families that cannot be used, though their configurations do not tell. A family that is absent
# here is judged by its layer types, by what its layers ask of the attention function, and in the
# end by the load check.
REFUSED: Final = {
    "bloom": "its attention adds ALiBi position biases, which are not supported",
    "mpt": "its attention adds ALiBi position biases, which are not supported",
    "big_bird": OWN_ATTENTION,
    "codegen": OWN_ATTENTION,
    "cpmant": OWN_ATTENTION,
    "falcon": OWN_ATTENTION,
    "git": OWN_ATTENTION,
    "gpt_neo": OWN_ATTENTION,
    "gpt_neox_japanese": OWN_ATTENTION,
    "gptj": OWN_ATTENTION,
    "megatron-bert": OWN_ATTENTION,
    "openai-gpt": OWN_ATTENTION,
    "reformer": OWN_ATTENTION,
    "rembert": OWN_ATTENTION,
    "roformer": OWN_ATTENTION,
    "trocr": OWN_ATTENTION,
    "xglm": OWN_ATTENTION,
    "xlm": OWN_ATTENTION,
    "xlnet": OWN_ATTENTION,
    "blt": _DROPS,
    "stablelm": _DROPS,
    "nemotron": _DROPS,
    "diffllama": "it subtracts two attentions in each layer (differential attention)",
    "llama4": "its chunked attention layers are not supported",
    "llama4_text": "its chunked attention layers are not supported",
    "falcon_mamba": NO_ATTENTION,
    "mamba": NO_ATTENTION,
    "mamba2": NO_ATTENTION,
    "recurrent_gemma": _OWN_STATE,
    "rwkv": NO_ATTENTION,
    "xlstm": NO_ATTENTION,
}
_STATISTICS: Final = "its layers take statistics over all of their activations"
WHOLE: Final = {"gemma3n": _STATISTICS, "gemma3n_text": _STATISTICS}
"""Families that have a tensor-parallel plan, but give other numbers when they are divided by it."""
_RECURRENT: Final = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
_LAYER_TYPES: Final = _RECURRENT | {"full_attention", "sliding_attention", "mlp", "moe"}


def refuse_family(config: PretrainedConfig) -> None:
    """Raise ModelError if the configuration tells that the model cannot give right numbers."""
    text = config.get_text_config(decoder=True)
    for model_type in (config.model_type, text.model_type):
        if model_type in REFUSED:
            raise ModelError(f"{model_type} models cannot be used: {REFUSED[model_type]}")
    if config.is_encoder_decoder:
        raise ModelError(
            f"{config.model_type} is an encoder-decoder; only decoder-only models can be used"
        )
    unknown = sorted(_layer_types(text) - _LAYER_TYPES)
    if unknown:
        raise ModelError(
            f"{text.model_type} has layers of type {', '.join(unknown)}; only those that attend "
            "to all or to a window, recurrent ones and MLPs can be used"
        )
    stored = quantisation_of(config)
    if stored is not None:
        check_packages(stored)


def recurrent_types(config: PretrainedConfig) -> list[str]:
    """Types of a model's layers that keep a state."""
    return sorted(_layer_types(config.get_text_config(decoder=True)) & _RECURRENT)


def _layer_types(text: PretrainedConfig) -> set[str]:
    found = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return set(found or ())
