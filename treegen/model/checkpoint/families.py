"""Support of model families: which are tested, which cannot be used, and why."""

import logging
from dataclasses import dataclass
from typing import Final

import transformers
from transformers import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from treegen.errors import ModelError
from treegen.model.checkpoint.quantization import check_packages, quantization_of
from treegen.prompts.images.table import Ahead

NO_ATTENTION: Final = "none of its layers computes attention, but treegen requires attention layers"
OWN_ATTENTION: Final = "its layers compute attention without transformers' attention interface"
OTHERS: Final = "see `treegen models` for supported families"


def _split_names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# Families that cannot be used although their configurations do not show it. `refusal` excludes
# those that the installed transformers has changed since. Other families are judged by their layer
# types, by their calls of the attention function, and finally by the load check.
REFUSED: Final = {
    **dict.fromkeys(
        _split_names("bloom mpt"),
        "its attention adds ALiBi position biases, which are not supported",
    ),
    **dict.fromkeys(
        _split_names(
            """
            big_bird codegen cpmant falcon git gpt_neo gpt_neox_japanese gptj megatron-bert
            openai-gpt reformer rembert roformer trocr xglm xlm xlnet
            """
        ),
        OWN_ATTENTION,
    ),
    **dict.fromkeys(
        _split_names("blt stablelm nemotron"),
        "its layers do not pass keyword arguments to attention",
    ),
    "doge": "its attention adds a bias to each key, and its experts mix the tokens of a pass",
    "deepseek_v4": "its layers compress blocks of tokens into keys, and a block may continue in "
    "other nodes",
    **dict.fromkeys(
        _split_names(
            "inkling2 inkling2_text inkling2_loop inkling2_loop_text inkling_mm_model inkling_text"
        ),
        "its attention adds biases that depend on the distance between tokens",
    ),
    "diffllama": "each layer subtracts two attention outputs (differential attention)",
    **dict.fromkeys(_split_names("falcon_mamba mamba mamba2 rwkv xlstm"), NO_ATTENTION),
    "recurrent_gemma": "its recurrent layers keep their states in the modules, not in a cache",
}
_STATISTICS: Final = "its layers compute statistics over all activations"
NOT_TENSOR_PARALLEL: Final = {
    "dots3_note_text": "their layers have different numbers of heads",
    "gemma3n": _STATISTICS,
    "gemma3n_text": _STATISTICS,
}
"""Families whose tensor-parallel plan in transformers gives wrong numbers, and why."""


# Families that are tested against transformers, model by model; see docs/models.md.
EXACT: Final = _split_names(
    """
    afmoe apertus arcee aria_text axk1 axk2 beam biogpt bitnet codegen cohere cohere2
    cohere2_moe ctrl cwm dbrx deepseek_v2 deepseek_v3 deepseek_v32 dory dots1 ernie4_5
    ernie4_5_moe exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text gemma3n_text
    gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt-sw3 gpt2
    gpt_bigcode gpt_neox gpt_oss gptj granite granite_swa granitemoe granitemoe_swa
    granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hy_v4 hyperclovax internlm3
    iquestcoder jais2 jetmoe kolibri1 laguna llama llama4_text longcat_flash mellum
    mimo_v2_flash minicpm3 minimax_m2 ministral ministral3 mistral mistral4 mixtral
    modernbert-decoder moshi nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phimoe qwen2
    qwen2_moe qwen3 qwen3_moe sarvam_mla sarvam_moe seed_oss smollm3 solar_open starcoder2
    vaultgemma youtu
    """
)
"""Families of text models that run compiled."""
ON_TEXT: Final = _split_names(
    """
    apertus1p5 aria aya_vision cohere2_vision cohere_compass cosmos3_edge cosmos3_omni
    deepseek_vl deepseek_vl_hybrid dots3_note ernie4_5_vl_moe exaone4_5 fuyu gemma3 gemma4
    gemma4_unified glm46v glm4v glm4v_moe glm_ocr glmasr got_ocr2 granite4_vision
    granite_docling granite_speech granite_speech_plus hy_v4_vl hyperclovax_vision_v2 idefics2
    idefics3 internvl kimi_k25 lighton_ocr llama4 llava llava_next llava_next_video
    llava_onevision minimax_m3_vl mistral3 mistral_large4 paddleocr_vl phi4_multimodal
    pp_chart2table qianfan_ocr qwen2_5_vl qwen2_audio qwen2_vl qwen3_asr qwen3_vl qwen3_vl_moe
    smolvlm step3p7 video_llama_3 video_llava vipllava voxtral
    """
)
"""Families of multimodal models that run compiled, with text inputs."""
IMAGES: Final = _split_names(
    """
    aya_vision gemma3 gemma4 idefics3 internvl llava llava_next llava_onevision mistral3
    phi4_multimodal qwen2_5_vl qwen2_vl qwen3_5 qwen3_vl smolvlm
    """
)
"""Families that take images, each tested against transformers."""
NO_IMAGES: Final = {
    "paligemma": "each prompt token attends to the whole prompt, so prompts cannot share keys",
}
"""Families whose images cannot be shared, and why."""
SOUND: Final[tuple[str, ...]] = ()
"""Families that take sound, each tested against transformers."""
RECURRENT: Final = {
    "gated delta rule": _split_names(
        "lara_mini olmo_hybrid qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next "
        "qwen4_exp qwen4_exp_text"
    ),
    "delta rule with a gate for each channel": _split_names("bailing_hybrid glm5_next kimi_linear"),
    "Mamba2": _split_names("bamba falcon_h1 granitemoehybrid nemotron_h zamba2"),
    "Mamba": _split_names("jamba zamba"),
    "linear attention": _split_names("minimax"),
    "short convolutions": _split_names("lfm2 lfm2_moe lfm2_vl lfm3 lfm3_vl zaya"),
}
"""Families with recurrent layers, by the kind of recurrence."""
SUPPORT_LEVELS: Final = {
    "exact": "compiled, with CUDA graphs",
    "exact on text": "compiled, with CUDA graphs; some take images, none takes sound",
    "exact with recurrent layers": "with CUDA graphs and a state stored at every node; most are "
    "compiled; with the gated delta rule and Mamba2, samples share one state",
    "not tested": "as its layers allow, if the check at load time finds it exact",
    "refused": "not at all",
}
"""Levels of support for a family, and how its models run on a GPU."""
_RECURRENT: Final = frozenset({"linear_attention", "conv", "mamba", "hybrid", "hybrid_sliding"})
CHUNKED: Final = "chunked_attention"
"""The type of a layer that attends within chunks, in `layer_types` of a configuration."""
_SPARSE: Final = frozenset(
    {
        "indexed_attention",
        "deepseek_sparse_attention",  # the same in older versions of transformers
        "qwen_sparse_attention",
        "minimax_m3_sparse",
    }
)
_BY_LAYER_TYPE: Final = frozenset({"dots3_note_text", "minimax_m3_vl_text"})
"""Families whose layers select keys only if their layer type says so."""
SELECTING: Final = frozenset(
    _split_names(
        """
        axk2 deepseek_v32 dots3_note_text glm5_next_text glm_moe_dsa hy_v4 hy_v4_vl_text
        minimax_m3_vl_text mistral_large4_text qwen4_exp_text
        """
    )
)
"""Families of text parts whose sparse layers are exact beyond the keys that they select."""
_LAYER_TYPES: Final = (
    _RECURRENT | _SPARSE | {"full_attention", "sliding_attention", CHUNKED, "mlp", "moe"}
)


def refusal(model_type: str) -> str | None:
    """Return why models of a family cannot be used with the installed transformers.

    Args:
        model_type: The family, as config.json names it.

    Returns:
        The reason, or None if the family is not known to be wrong.
    """
    reason = REFUSED.get(model_type)
    if reason == OWN_ATTENTION and _calls_the_interface(model_type):
        return None
    return reason


def _calls_the_interface(model_type: str) -> bool:
    """Return whether the installed transformers says that a family takes any attention function."""
    kind = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type, ""), None)
    return bool(getattr(kind, "_supports_attention_backend", False))


def get_support(model_type: str) -> str:
    """Return the support of a family, one of `SUPPORT_LEVELS`.

    Single models of a supported family may still be refused.
    """
    if refusal(model_type):
        return "refused"
    if model_type in EXACT:
        return "exact"
    if model_type in ON_TEXT:
        return "exact on text"
    if any(model_type in names for names in RECURRENT.values()):
        return "exact with recurrent layers"
    return "not tested"


def is_tested(model_type: str) -> bool:
    """Return whether a family is tested against transformers."""
    return get_support(model_type) not in ("not tested", "refused")


def refuse_family(config: PretrainedConfig) -> None:
    """Raise ModelError if the configuration shows that the model cannot give right numbers."""
    text = config.get_text_config(decoder=True)
    for model_type in (config.model_type, text.model_type):
        if reason := refusal(model_type):
            raise ModelError(f"{model_type} models cannot be used: {reason}; {OTHERS}")
    if config.is_encoder_decoder:
        raise ModelError(
            f"{config.model_type} is an encoder-decoder; only decoder-only models can be used"
        )
    unknown = sorted(_layer_types(text) - _LAYER_TYPES)
    if dense_length(text) == 0:
        unknown = sorted(_layer_types(text) & _SPARSE)
    if CHUNKED in _layer_types(text) and not getattr(text, "attention_chunk_size", None):
        unknown = [CHUNKED]
    if unknown:
        raise ModelError(
            f"{text.model_type} has layers of type {', '.join(unknown)}; treegen supports full "
            "attention, sliding windows, recurrent layers and MLPs"
        )
    if getattr(text, "recurrent_kv_cache_mode", None) == "last_loop":
        raise ModelError(
            f"{text.model_type} models cannot be used with recurrent_kv_cache_mode last_loop, "
            "because this mode does not keep the keys of earlier loops; set "
            "recurrent_kv_cache_mode to per_loop in config.json"
        )
    stored = quantization_of(config)
    if stored is not None:
        check_packages(stored)


def refuse_images(config: PretrainedConfig) -> None:
    """Raise ModelError if models with this configuration cannot take images."""
    if config.model_type in NO_IMAGES:
        raise ModelError(
            f"{config.model_type} models cannot take images: {NO_IMAGES[config.model_type]}"
        )
    if config.model_type not in IMAGES:
        raise ModelError(
            f"{config.model_type} models support only text input; use a family that supports "
            f"images: {', '.join(IMAGES)}"
        )
    text = config.get_text_config(decoder=True)
    if getattr(text, "use_bidirectional_attention", None) not in (None, False, "vision"):
        raise ModelError(
            f"all tokens of this {config.model_type} model attend to later tokens, which is not "
            "supported; use another model"
        )


def sees_ahead(config: PretrainedConfig) -> Ahead | None:
    """Return in which layers image tokens attend to later image tokens; None for no layer."""
    if config.model_type == "gemma3":
        return "all"
    text = config.get_text_config(decoder=True)
    is_ahead = getattr(text, "use_bidirectional_attention", None) == "vision"
    return "windowed" if is_ahead else None


def has_loops(text: PretrainedConfig) -> bool:
    """Return whether a model runs some layers several times, with keys of their own each time."""
    return bool(text.model_type == "dory")


def recurrent_types(config: PretrainedConfig) -> list[str]:
    """Return the types of a model's layers that keep a state."""
    return sorted(_layer_types(config.get_text_config(decoder=True)) & _RECURRENT)


def dense_length(text: PretrainedConfig) -> int | None:
    """Return the number of keys up to which sparse layers attend to all of them.

    Args:
        text: The configuration of the text part.

    Returns:
        The number; None for a model without such layers, 0 if it is unknown.
    """
    # These families build indexers whatever their layer types say.
    selects = text.model_type not in _BY_LAYER_TYPE and getattr(text, "index_topk", None)
    if not selects and not _layer_types(text) & _SPARSE:
        return None
    # The selected keys are single ones, or blocks: complete ones, and then the last keys as well.
    num_keys, size = getattr(text, "index_topk", None), getattr(text, "index_kpool", 1)
    if not getattr(text, "index_kpool_always_select_tail", True):
        return 0
    if blocks := getattr(text, "index_topk_blocks", None):
        num_keys = blocks * text.index_block_size
    if budget := getattr(text, "indexer_budget", None):
        num_keys, size = budget, text.indexer_compress_ratio
    return num_keys // size * size if num_keys else 0


def selects_keys(text: PretrainedConfig) -> bool:
    """Return whether sparse layers select among more keys than they attend to.

    Such models take texts beyond `dense_length`; others end there.
    """
    length = dense_length(text)
    declared = getattr(text, "max_position_embeddings", None)
    # Of more local blocks than selected ones, transformers takes any.
    if getattr(text, "index_local_blocks", 0) > getattr(text, "index_topk_blocks", 0):
        return False
    return bool(text.model_type in SELECTING and length and declared and length < declared)


def _layer_types(text: PretrainedConfig) -> set[str]:
    types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None)
    return set(types or ())


def inputs_of(model_type: str) -> tuple[str, ...]:
    """Return the inputs that a family takes (text, images, sound); empty if it is refused."""
    if refusal(model_type):
        return ()
    families_of = {"images": IMAGES, "sound": SOUND}
    return ("text", *(name for name, names in families_of.items() if model_type in names))


@dataclass(frozen=True, slots=True)
class Family:
    """A family for which the installed transformers can generate text."""

    model_type: str
    """The family, as config.json names it."""
    support: str
    """Its support, one of `SUPPORT_LEVELS`."""
    why: str = ""
    """The reason if it is refused; else empty."""

    @property
    def takes(self) -> tuple[str, ...]:
        """The inputs that its models take; empty if it is refused."""
        return () if self.support == "refused" else inputs_of(self.model_type)


def all_families() -> list[Family]:
    """Return every family for which the installed transformers can generate text, sorted by name.

    Untested families may be refused because of their default configurations.
    """
    model_types = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES}
    model_types |= {
        *REFUSED,
        *EXACT,
        *ON_TEXT,
        *(model_type for names in RECURRENT.values() for model_type in names),
    }
    logger = logging.getLogger("transformers")  # it warns about some default configurations
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        return [_family(name) for name in sorted(model_types) if name in CONFIG_MAPPING]
    finally:
        logger.setLevel(level)


def _family(model_type: str) -> Family:
    support = get_support(model_type)
    if support != "not tested":
        return Family(model_type, support, refusal(model_type) or "")
    try:
        refuse_family(CONFIG_MAPPING[model_type]())
    except ModelError as error:
        _, _, why = str(error).partition(" ")  # the text after the family's name
        return Family(model_type, "refused", why.partition(";")[0])
    except Exception:  # a configuration class without defaults
        return Family(model_type, support)
    return Family(model_type, support)
