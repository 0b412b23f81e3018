"""Which model families cannot be used, and why."""

from importlib.util import find_spec
from typing import Final

from transformers import PretrainedConfig

from treegen.errors import ModelError

_RECURRENT: Final = "its recurrent layers keep a state that cannot be shared between branches"
_CONVOLUTIONS: Final = "its short convolutions keep a state that cannot be shared between branches"
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
    "falcon_h1": _RECURRENT,
    "jamba": _RECURRENT,
    "mamba": _RECURRENT,
    "mamba2": _RECURRENT,
    "recurrent_gemma": _RECURRENT,
    "rwkv": _RECURRENT,
    "qwen3_next": _RECURRENT,
    "qwen3_5": _RECURRENT,
    "qwen3_5_text": _RECURRENT,
    "xlstm": _RECURRENT,
    "lfm2": _CONVOLUTIONS,
    "lfm2_moe": _CONVOLUTIONS,
}
_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})
# transformers expands these to 16 bits while the weights load. Others need kernels of their own.
DEQUANTISED: Final = ("mxfp4", "fp8")


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
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    unknown = sorted(set(layer_types or ()) - _LAYER_TYPES)
    if unknown:
        raise ModelError(
            f"{text.model_type} has layers of type {', '.join(unknown)}; only full_attention and "
            "sliding_attention can be used"
        )
    method = quantisation_of(config)
    if method not in (None, *DEQUANTISED):
        raise ModelError(
            f"quantised weights ({method}) are not supported; use the checkpoint in bfloat16 or "
            "float32"
        )
    if method == "fp8" and find_spec("accelerate") is None:
        raise ModelError(
            "weights in FP8 are expanded by accelerate, which is not installed: pip install "
            "'treegen[fp8]'"
        )


def quantisation_of(config: PretrainedConfig) -> str | None:
    """Return the name of the method that a checkpoint's weights are quantised with, if any."""
    settings = getattr(config, "quantization_config", None)
    settings = settings or getattr(
        config.get_text_config(decoder=True), "quantization_config", None
    )
    if settings is None:
        return None
    if not isinstance(settings, dict):
        settings = settings.to_dict()
    method = settings.get("quant_method")
    return str(getattr(method, "value", method))
