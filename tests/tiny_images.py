"""Tiny checkpoints of models that take images, with tokenizers and processors, made offline."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from tiny_models import spread_weights, tiny_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
    LlavaOnevisionImageProcessorPil,
)
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from treegen.model.checkpoint.text_part import auto_class

TEXT = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
CHAT = (
    "{% for m in messages %}<s>{{ m.role }}:"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}IMAGE{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def _tokenizer(image: str, *more: str, **names: str) -> PreTrainedTokenizerFast:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizer().backend_tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        extra_special_tokens=names,
    )
    tokenizer.add_special_tokens({"additional_special_tokens": [image, *more]})
    return tokenizer


def _save(
    directory: Path, config: Any, processor: Any, marker: str, seed: int, **settings: Any
) -> Path:
    """settings: of the processor, beside its parts."""
    model = auto_class(config, images=True).from_config(config)
    spread_weights(model, seed)
    model.save_pretrained(directory)
    processor.tokenizer.chat_template = CHAT.replace("IMAGE", marker)
    processor.image_processor.save_pretrained(directory)
    processor.tokenizer.save_pretrained(directory)
    settings["processor_class"] = type(processor).__name__
    (directory / "processor_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return directory


def _without_videos(kind: Any, **parts: Any) -> Any:
    """A processor without its part for videos, which torchvision has."""

    class Alone(kind):  # type: ignore[misc]
        def check_argument_for_proper_class(self, name: str, argument: Any) -> Any:
            return argument and super().check_argument_for_proper_class(name, argument)

    Alone.__name__ = kind.__name__
    return Alone(**parts)


PATCHES = {
    "patch_size": 7,
    "vision_feature_select_strategy": "default",
    "num_additional_image_tokens": 1,
}


def _llava(directory: Path, seed: int) -> Path:
    tokenizer = _tokenizer("<image>")
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **TOWER},
        image_token_index=image,
        vision_feature_layer=-1,
    )
    processor = transformers.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}),
        tokenizer,
        **PATCHES,
    )
    return _save(directory, config, processor, "<image>", seed, **PATCHES)


QWEN = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}


def _qwen(
    directory: Path, seed: int, kind: str, processor: str, text: Any, vision: Any, patch: int = 4
) -> Path:
    tokenizer = _tokenizer(*QWEN)
    image, start, end, video = tokenizer.convert_tokens_to_ids(list(QWEN))
    config = getattr(transformers, f"{kind}Config")(
        text_config={**TEXT, **text},
        vision_config={"depth": 2, "num_heads": 2, **vision},
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=video,
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=patch, size={"shortest_edge": 8 * 8 * 4, "longest_edge": 8 * 8 * 24}
    )
    made = _without_videos(
        getattr(transformers, processor), image_processor=images, tokenizer=tokenizer
    )
    marker = "<|vision_start|><|image_pad|><|vision_end|>"
    return _save(directory, config, made, marker, seed)


def _qwen2_vl(directory: Path, seed: int) -> Path:
    vision = {"embed_dim": 16, "hidden_size": 32, "patch_size": 4, "mlp_ratio": 2}
    text = {"rope_parameters": MROPE}
    return _qwen(directory, seed, "Qwen2VL", "Qwen2VLProcessor", text, vision)


def _qwen2_5_vl(directory: Path, seed: int) -> Path:
    vision = {
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "patch_size": 4,
        "window_size": 16,
        "fullatt_block_indexes": [1],
    }
    text = {"rope_parameters": MROPE}
    return _qwen(directory, seed, "Qwen2_5_VL", "Qwen2_5_VLProcessor", text, vision)


QWEN3_TOWER = {
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 24,
    "patch_size": 4,
    "num_position_embeddings": 36,
}


def _qwen3_vl(directory: Path, seed: int) -> Path:
    text = {"head_dim": 8, "rope_parameters": MROPE, "num_hidden_layers": 3}
    vision = {**QWEN3_TOWER, "depth": 3, "deepstack_visual_indexes": [0, 1]}
    return _qwen(directory, seed, "Qwen3VL", "Qwen3VLProcessor", text, vision)


def _qwen3_5(directory: Path, seed: int) -> Path:
    text = {
        "head_dim": 8,
        "rope_parameters": {**MROPE, "partial_rotary_factor": 1.0},
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
    return _qwen(directory, seed, "Qwen3_5", "Qwen3VLProcessor", text, QWEN3_TOWER)


def _in_rows(directory: Path, seed: int, kind: str, image_processor: Any) -> Path:
    """A model that takes the parts of an image row by row."""
    rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(3) for j in range(3)]
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", *rows)
    processor = _without_videos(
        getattr(transformers, f"{kind}Processor"),
        image_processor=image_processor(
            size={"longest_edge": 56}, max_image_size={"longest_edge": 28}
        ),
        tokenizer=tokenizer,
        image_seq_len=4,
    )
    config = getattr(transformers, f"{kind}Config")(
        text_config={"model_type": "llama", **TEXT},
        vision_config=TOWER,
        scale_factor=2,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=2,
    )
    return _save(directory, config, processor, "<image>", seed, image_seq_len=4)


def _idefics3(directory: Path, seed: int) -> Path:
    return _in_rows(directory, seed, "Idefics3", Idefics3ImageProcessorPil)


def _smolvlm(directory: Path, seed: int) -> Path:
    return _in_rows(directory, seed, "SmolVLM", SmolVLMImageProcessorPil)


def _internvl(directory: Path, seed: int) -> Path:
    names = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    tokenizer = _tokenizer(*names.values(), **names)
    config = transformers.InternVLConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={**TOWER, "image_size": [28, 28], "patch_size": [7, 7]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"),
        image_seq_length=4,
        tie_word_embeddings=False,
    )
    images = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4
    )
    processor = _without_videos(
        transformers.InternVLProcessor,
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_length=4,
    )
    return _save(directory, config, processor, "<IMG_CONTEXT>", seed, image_seq_length=4)


GRID = [[28, 56], [56, 28], [56, 56]]


def _llava_next(directory: Path, seed: int) -> Path:
    tokenizer = _tokenizer("<image>")
    config = transformers.LlavaNextConfig(
        text_config={"model_type": "llama", **TEXT},
        vision_config={"model_type": "clip_vision_model", **TOWER},
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-1,
        image_grid_pinpoints=GRID,
        image_seq_length=16,
    )
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 28},
        crop_size={"height": 28, "width": 28},
        image_grid_pinpoints=GRID,
    )
    processor = transformers.LlavaNextProcessor(images, tokenizer, **PATCHES)
    return _save(directory, config, processor, "<image>", seed, **PATCHES)


def _llava_onevision(directory: Path, seed: int) -> Path:
    tokenizer = _tokenizer("<image>", "<video>")
    image, video = tokenizer.convert_tokens_to_ids(["<image>", "<video>"])
    config = transformers.LlavaOnevisionConfig(
        text_config={"model_type": "qwen2", **TEXT},
        vision_config={"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
        image_token_index=image,
        video_token_index=video,
        image_grid_pinpoints=GRID,
    )
    settings = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    images = LlavaOnevisionImageProcessorPil(
        size={"height": 28, "width": 28}, image_grid_pinpoints=GRID
    )
    processor = _without_videos(
        transformers.LlavaOnevisionProcessor,
        image_processor=images,
        tokenizer=tokenizer,
        **settings,
    )
    return _save(directory, config, processor, "<image>", seed, **settings)


def _aya_vision(directory: Path, seed: int) -> Path:
    own = ["<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "TILE_GLOBAL"]
    tokenizer = _tokenizer("<image>", *own, *(f"TILE_{i}" for i in range(1, 5)))
    config = transformers.AyaVisionConfig(
        text_config={"model_type": "cohere2", **TEXT, "logit_scale": 1.0},
        vision_config={"model_type": "siglip_vision_model", **TOWER, "vision_use_head": False},
        image_token_index=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"),
    )
    settings = {"patch_size": 14, "img_size": 28, "downsample_factor": 1}
    images = GotOcr2ImageProcessorPil(
        size={"height": 28, "width": 28}, crop_to_patches=True, max_patches=4
    )
    processor = transformers.AyaVisionProcessor(images, tokenizer, **settings)
    return _save(directory, config, processor, "<image>", seed, **settings)


def _mistral3(directory: Path, seed: int) -> Path:
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = transformers.Mistral3Config(
        text_config={"model_type": "mistral", **TEXT, "head_dim": 8},
        vision_config={
            "model_type": "pixtral",
            "hidden_size": 32,
            "intermediate_size": 32,
            "patch_size": 7,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "image_size": 56,
        },
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    settings = {"patch_size": 7, "spatial_merge_size": 2}
    images = PixtralImageProcessorPil(size={"longest_edge": 56}, patch_size=7)
    processor = transformers.PixtralProcessor(images, tokenizer, **settings)
    return _save(directory, config, processor, "[IMG]", seed, **settings)


def _gemma3(directory: Path, seed: int) -> Path:
    names = {"image_token": "<image>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
    tokenizer = _tokenizer(*names.values(), **names)
    ids = tokenizer.convert_tokens_to_ids(list(names.values()))
    config = transformers.Gemma3Config(
        text_config={
            **TEXT,
            "head_dim": 8,
            "num_hidden_layers": 3,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "query_pre_attn_scalar": 8,
            "tie_word_embeddings": False,
        },
        vision_config={**TOWER, "image_size": 24, "patch_size": 4, "vision_use_head": False},
        mm_tokens_per_image=9,
        image_token_index=ids[0],
        boi_token_index=ids[1],
        eoi_token_index=ids[2],
        tie_word_embeddings=False,
    )
    images = Gemma3ImageProcessorPil(size={"height": 24, "width": 24})
    processor = transformers.Gemma3Processor(images, tokenizer, image_seq_length=9)
    return _save(directory, config, processor, "<boi>", seed, image_seq_length=9)


def _gemma4_vision(directory: Path, seed: int) -> Path:
    return _gemma4(directory, seed, ahead="vision")


def _gemma4(directory: Path, seed: int, ahead: str | None = None) -> Path:
    names = {
        "image_token": "<image>",
        "boi_token": "<boi>",
        "eoi_token": "<eoi>",
        "audio_token": "<audio>",
        "boa_token": "<boa>",
        "eoa_token": "<eoa>",
    }
    tokenizer = _tokenizer(*names.values(), "<|video|>", **names)
    ids = {f"{name}_id": tokenizer.convert_tokens_to_ids(token) for name, token in names.items()}
    ids["eoa_token_index"] = ids.pop("eoa_token_id")
    config = transformers.Gemma4Config(
        text_config={
            **TEXT,
            "head_dim": 8,
            "global_head_dim": 8,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "sliding_window": 24,
            "vocab_size_per_layer_input": TEXT["vocab_size"],
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 0,
            "use_bidirectional_attention": ahead,
            "tie_word_embeddings": False,
        },
        vision_config={
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "position_embedding_size": 64,
        },
        audio_config=None,
        tie_word_embeddings=False,
        video_token_id=tokenizer.convert_tokens_to_ids("<|video|>"),
        **ids,
    )
    images = Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70, pooling_kernel_size=2)
    processor = _without_videos(
        transformers.Gemma4Processor,
        feature_extractor=None,
        image_processor=images,
        tokenizer=tokenizer,
        video_processor=None,
        image_seq_length=70,
    )
    return _save(directory, config, processor, "<image>", seed, image_seq_length=70)


def _phi4_multimodal(directory: Path, seed: int) -> Path:
    """The processor counts 16 x 16 tokens of an image whatever its settings say."""
    from transformers.models.phi4_multimodal import image_processing_phi4_multimodal as of_phi4

    kind = (
        getattr(of_phi4, "Phi4MultimodalImageProcessor", None)
        or of_phi4.Phi4MultimodalImageProcessorFast
    )
    names = {"image_token": "<|image|>", "audio_token": "<|audio|>"}
    tokenizer = _tokenizer(*names.values(), **names)
    ids = tokenizer.convert_tokens_to_ids(list(names.values()))
    images = kind(size={"height": 64, "width": 64}, patch_size=2, dynamic_hd=2)
    config = transformers.Phi4MultimodalConfig(
        **TEXT,
        vision_config={
            **TOWER,
            "image_size": 64,
            "crop_size": 64,
            "patch_size": 2,
            "image_token_id": ids[0],
        },
        audio_config={
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_blocks": 1,
            "num_attention_heads": 2,
            "ext_pw_out_channel": 16,
            "depthwise_separable_out_channel": 16,
            "nemo_conv_channels": 8,
            "audio_token_id": ids[1],
        },
        tie_word_embeddings=False,
    )
    processor = _without_videos(
        transformers.Phi4MultimodalProcessor,
        image_processor=images,
        audio_processor=None,
        tokenizer=tokenizer,
    )
    return _save(directory, config, processor, "<|image|>", seed)


NEEDED: dict[str, str] = {
    "mistral3": "torchvision",
    "phi4_multimodal": "torchvision",
    "smolvlm": "num2words",
}
"""Packages that processors of families need beside transformers."""
MAKERS: dict[str, Callable[[Path, int], Path]] = {
    "aya_vision": _aya_vision,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "gemma4-vision": _gemma4_vision,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "mistral3": _mistral3,
    "phi4_multimodal": _phi4_multimodal,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_vl": _qwen3_vl,
    "smolvlm": _smolvlm,
}


def save_tiny_vision_model(directory: Path, family: str, seed: int = 0) -> Path:
    """Write a checkpoint with random weights, a tokenizer and a processor."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return MAKERS[family](directory, seed)


def picture(seed: int, width: int = 40, height: int = 28) -> Image.Image:
    """An image of smooth random colours."""
    numbers = torch.rand(3, 4, 5, generator=torch.Generator().manual_seed(seed))
    smooth = torch.nn.functional.interpolate(numbers[None], (height, width), mode="bilinear")[0]
    return Image.fromarray((smooth.permute(1, 2, 0) * 255).byte().numpy())
