"""Image models to measure: shapes with random weights, or a checkpoint.

Both come with their model's image processor, so an image becomes the usual number of tokens.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.bench.shapes import SHAPES, Shape, shape_of
from treegen.common.formatting import format_bytes
from treegen.errors import CapacityError, InputError

if TYPE_CHECKING:
    from treegen.model.model import Model
    from treegen.prompts.images.table import PlacedImage

_LEAST_SIDE: Final = 64  # pixels
_LARGE_SIDE: Final = 1024  # no processor enlarges images of this size
_MOST_SIDE: Final = 8192
_STEPS: Final = 8  # bisection steps for the side
_MARKERS: Final = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
_CONTEXT: Final = 65_536


@dataclass(frozen=True, slots=True)
class VisionShape:
    """The sizes of a model with a vision tower, in the form of Qwen3-VL.

    text: its language model. depth, hidden, intermediate: layers of the tower, and their widths.
    deepstack: the layers of the tower that are added to the first layers of the language model.
    patch: side of a patch in pixels; four patches become a token.
    """

    text: Shape
    depth: int
    hidden: int
    intermediate: int
    deepstack: tuple[int, ...]
    heads: int = 16
    patch: int = 16
    positions: int = 2304


VISION_SHAPES: Final = {
    "tiny-vl": VisionShape(
        Shape("tiny-vl", "qwen3_vl", 64, 192, 2, 8, 2, 8, 512), 2, 16, 24, (0,), 2, 4, 36
    ),
    "qwen3-vl-4b": VisionShape(SHAPES["qwen3-4b"], 24, 1024, 4096, (5, 11, 17)),
    "qwen3-vl-8b": VisionShape(
        Shape("qwen3-8b", "qwen3", 4096, 12_288, 36, 32, 8, 128, 151_936),
        27,
        1152,
        4304,
        (8, 16, 24),
    ),
}


def check_alone(image_tokens: int, **others: object) -> None:
    """Reject options that cannot be combined with images.

    Args:
        image_tokens: Tokens of an image before each prefix; 0 for no image.
        others: The other options, by name.

    Raises:
        InputError: there is an image, and one of the others is set.
    """
    for name, given in others.items():
        if image_tokens and given:
            raise InputError(f"--image-tokens does not go with --{name}; leave one out")


def check_shape(name: str, *, images: bool) -> str:
    """Return the name of a shape if it suits the prompts.

    Args:
        name: The name.
        images: Whether prompts have images.

    Raises:
        InputError: there is no such shape, or it is not for such prompts.
    """
    if images and name not in VISION_SHAPES:
        raise InputError(
            f"with --image-tokens, --shape must be one of {', '.join(VISION_SHAPES)}, got {name!r}"
        )
    if not images and name in VISION_SHAPES:
        raise InputError(f"--shape {name} is for treegen bench decode --image-tokens; give that")
    return name if images else shape_of(name).name


def build_vision_model(
    name: str, *, dtype: str = "auto", device: str = "auto", kv_cache_dtype: str = "auto"
) -> tuple[Model, Any]:
    """Return a model with a vision tower and random weights, and a tokenizer with its images.

    Args:
        name: The name of the shape.
        dtype: The type of the weights; "auto" is bfloat16 on a GPU and float32 on a CPU.
        device: The device; "auto" is a GPU if there is one.
        kv_cache_dtype: Type of keys and values in the cache, as for `load_model`.

    Raises:
        InputError: there is no such shape, or the dtype or the device cannot be used.
        CapacityError: the weights do not fit.
    """
    check_shape(name, images=True)
    import torch
    from transformers import AutoModelForImageTextToText

    from treegen.bench.timing import free_bytes
    from treegen.bench.tiny import byte_tokenizer
    from treegen.model.config import resolve_device, resolve_dtype
    from treegen.model.load import from_module
    from treegen.model.memory import empty_device_cache
    from treegen.model.vision.processor import load_processor
    from treegen.model.vision.tower import VisionTower

    shape = VISION_SHAPES[name]
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(_MARKERS)})
    config = _config(shape, tokenizer.convert_tokens_to_ids(list(_MARKERS)))
    target = resolve_device(device)
    kind = resolve_dtype(dtype, config, target)
    empty_device_cache(target)
    with torch.device("meta"):
        bare = AutoModelForImageTextToText.from_config(config)
    size, free = sum(w.numel() for w in bare.parameters()) * kind.itemsize, free_bytes(target)
    if size > free:
        raise CapacityError(
            f"the weights of {name} take {format_bytes(size)} in {kind}, and {target} has "
            f"{format_bytes(free)} free; choose a smaller --shape"
        )
    with torch.random.fork_rng([target] if target.type == "cuda" else []), torch.device(target):
        torch.manual_seed(0)
        module = AutoModelForImageTextToText.from_config(config, dtype=kind)
    model = from_module(module, name=name, kv_cache_dtype=kv_cache_dtype)
    model.tower = VisionTower(module, config.image_token_id)
    with tempfile.TemporaryDirectory() as folder:
        _write_processor(Path(folder), shape)
        processor = load_processor(Path(folder), config, tokenizer)
    model.images = processor.enable_images(tokenizer, model.spec.vocab_size)
    return model, tokenizer


def load_checkpoint(
    path: str, *, ranks: int = 1, images: bool = False, **kind: Any
) -> tuple[Model, Any]:
    """Return the model of a checkpoint, and its tokenizer.

    Args:
        path: The directory or hub name of the checkpoint.
        ranks: GPUs that compute the model together. Default: 1.
        images: Whether the model takes images. Default: False.
        kind: Further fields of `EngineOptions`.

    Raises:
        InputError: the dtype or the device cannot be used.
        ModelError: the checkpoint or its tokenizer cannot be loaded, or it takes no images.
    """
    from treegen.model.options import EngineOptions
    from treegen.model.rank_processes import load_from_options
    from treegen.model.tokenizer import load_image_processor, load_tokenizer

    options = EngineOptions(model=path, images=images, tensor_parallel_size=ranks, **kind)
    tokenizer = load_tokenizer(path)
    processor = load_image_processor(options, tokenizer) if images else None
    model = load_from_options(options)
    if processor is not None:
        model.images = processor.enable_images(tokenizer, model.spec.vocab_size)
    return model, tokenizer


def image_of(model: Model, tokens: int) -> PlacedImage:
    """Return a square image that becomes as close to `tokens` tokens as possible.

    Args:
        model: A model that takes images.
        tokens: Desired number of tokens.

    Raises:
        InputError: no image becomes about this many tokens, or they exceed the model's context.
    """
    from PIL import Image

    table = model.images
    assert table is not None
    if tokens > model.spec.context_length:
        raise InputError(
            f"--image-tokens {tokens:,} are more than the model's context of "
            f"{model.spec.context_length:,} tokens; ask for fewer"
        )

    def make_square(side: int) -> PlacedImage:
        return table.add(Image.new("RGB", (side, side)))

    tried = [make_square(side := _LEAST_SIDE)]
    while tried[-1].num < tokens and side < _MOST_SIDE:
        tried.append(make_square(side := side * 2))
        if side >= _LARGE_SIDE and tried[-1].num == tried[-2].num:
            break  # the processor shrinks all larger images
    low, high = side // 2, side
    for _ in range(_STEPS if tried[-1].num > tokens else 0):
        tried.append(make_square(middle := (low + high) // 2))
        low, high = (middle, high) if tried[-1].num < tokens else (low, middle)
    nearest = min(tried, key=lambda image: (abs(image.num - tokens), image.size))
    if not tokens / 2 <= nearest.num <= tokens * 2:
        raise InputError(
            f"--image-tokens {tokens:,} is far from what images become with this model; the "
            f"nearest is {nearest.num:,}, ask for that"
        )
    return nearest


def _config(shape: VisionShape, markers: list[int]) -> Any:
    from transformers import AutoConfig

    text = shape.text
    image, start, end, video = markers
    axes = text.head_dim // 2
    return AutoConfig.for_model(
        "qwen3_vl",
        text_config={
            "vocab_size": text.vocab_size,
            "hidden_size": text.hidden,
            "intermediate_size": text.intermediate,
            "num_hidden_layers": text.layers,
            "num_attention_heads": text.q_heads,
            "num_key_value_heads": text.kv_heads,
            "head_dim": text.head_dim,
            "max_position_embeddings": _CONTEXT,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 1,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 5e6,
                "mrope_section": [axes - 2 * (axes // 3), axes // 3, axes // 3],
            },
        },
        vision_config={
            "depth": shape.depth,
            "hidden_size": shape.hidden,
            "num_heads": shape.heads,
            "intermediate_size": shape.intermediate,
            "out_hidden_size": text.hidden,
            "patch_size": shape.patch,
            "num_position_embeddings": shape.positions,
            "deepstack_visual_indexes": list(shape.deepstack),
        },
        tie_word_embeddings=text.tied,
        image_token_id=image,
        vision_start_token_id=start,
        vision_end_token_id=end,
        video_token_id=video,
    )


def _write_processor(folder: Path, shape: VisionShape) -> None:
    """Write the files of a processor that leaves images at their size."""
    token = (2 * shape.patch) ** 2  # pixels
    images = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": shape.patch,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 4 * token, "longest_edge": 2**16 * token},
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images), encoding="utf-8")
    name = json.dumps({"processor_class": "Qwen3VLProcessor"})
    (folder / "processor_config.json").write_text(name, encoding="utf-8")
