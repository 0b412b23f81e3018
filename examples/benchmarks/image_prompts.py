"""Samples below an image: the time of the vision tower, of prefill and of decode steps.

Models are shapes with random weights, or a checkpoint. Both come with their model's image
processor, so an image becomes the usual number of tokens. docs/images.md names

    python examples/benchmarks/image_prompts.py --image-tokens 2000 --shape qwen3-vl-8b
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, cast

import click
import numpy as np
import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText

from treegen.bench.decode import Bench, WorkloadResult
from treegen.bench.shapes import SHAPES, Shape, byte_tokenizer
from treegen.bench.timing import Spread, free_bytes
from treegen.bench.workloads import DECODE_MODES, Case, Workload, decode_cases
from treegen.cli.bench.decode import check_runs, measure_cases
from treegen.cli.bench.options import RUNS, int_list_option, int_option, name_list_option
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.common.formatting import format_bytes
from treegen.errors import CapacityError, InputError
from treegen.model.config import resolve_device, resolve_dtype
from treegen.model.load import from_module
from treegen.model.memory import empty_device_cache
from treegen.model.model import Model
from treegen.model.options import EngineOptions
from treegen.model.rank_processes import load_from_options
from treegen.model.tokenizer import load_image_processor, load_tokenizer
from treegen.model.vision import VisionTower, load_processor
from treegen.prompts.images.table import PlacedImage
from treegen.prompts.tree import Node
from treegen.report.tables import PrintableTable

_MIN_SIDE: Final = 64  # pixels
_LARGE_SIDE: Final = 1024  # no processor enlarges images of this size
_MAX_SIDE: Final = 8192
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


def check_shape(name: str) -> str:
    """Return the name of a shape with a vision tower.

    Raises:
        InputError: there is no such shape.
    """
    if name not in VISION_SHAPES:
        raise InputError(f"--shape must be one of {', '.join(VISION_SHAPES)}, got {name!r}")
    return name


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
    check_shape(name)
    shape = VISION_SHAPES[name]
    tokenizer = byte_tokenizer()
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
            f"the weights of {name} take {format_bytes(size)} in {kind}, but {target} has only "
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


def load_checkpoint(path: str, **kind: Any) -> tuple[Model, Any]:
    """Return the model of a checkpoint, and its tokenizer with the images of the model.

    Args:
        path: The directory or hub name of the checkpoint.
        kind: Further fields of `EngineOptions`.

    Raises:
        InputError: the dtype or the device cannot be used.
        ModelError: the checkpoint or its tokenizer cannot be loaded, or it takes no images.
    """
    options = EngineOptions(model=path, images=True, **kind)
    tokenizer = load_tokenizer(path)
    processor = load_image_processor(options, tokenizer)
    model = load_from_options(options)
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
    table = model.images
    assert table is not None
    if tokens > model.spec.context_length:
        raise InputError(
            "--image-tokens must be at most the model's context length of "
            f"{model.spec.context_length:,}, got {tokens:,}"
        )

    def make_square(side: int) -> PlacedImage:
        return table.add(Image.new("RGB", (side, side)))

    tried = [make_square(side := _MIN_SIDE)]
    while tried[-1].num < tokens and side < _MAX_SIDE:
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
            f"no image of this model has about {tokens:,} tokens; set --image-tokens to "
            f"{nearest.num}, the nearest possible number"
        )
    return nearest


def _config(shape: VisionShape, markers: list[int]) -> Any:
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


@dataclass(frozen=True, slots=True)
class ImageWorkload(Workload):
    """A workload whose prefixes begin with an image.

    image_tokens: how many tokens at the start of each prefix belong to the image.
    image_id: the id of its first token; see `treegen.prompts.images.table`.
    """

    image_tokens: int = 0
    image_id: int = 0

    def tree(self, tokenizer: Any, vocab_size: int) -> Node:
        """Return the prompts."""
        image = range(self.image_id, self.image_id + self.image_tokens)
        text = replace(self, prefix=self.prefix - len(image))
        text_tree = Workload.tree(text, tokenizer, vocab_size)

        def add_image(root: Node) -> Node:
            return replace(root, content=[*image, *cast(Sequence[int], root.content)])

        if self.prefixes == 1:
            return add_image(text_tree)
        return replace(text_tree, children=[add_image(root) for root in text_tree.children])


def add_image(image: PlacedImage, case: Case) -> Case:
    """Return a case with an image before each prefix."""
    job = case.workload
    sizes = {field.name: getattr(job, field.name) for field in fields(job)}
    sizes["prefix"] += image.num
    workload = ImageWorkload(**sizes, image_tokens=image.num, image_id=image.first)
    return replace(case, workload=workload)


@dataclass(frozen=True, slots=True)
class ImageResult(WorkloadResult):
    """The result of a workload.

    encode_seconds: the time to encode the image at the start of a prefix. Timed prefill passes
    find it encoded.
    """

    encode_seconds: Spread | None = None


class ImageBench(Bench):
    """Runs treegen's modes, and times the tower of the model."""

    def measure(self, cases: Sequence[Case]) -> Iterator[WorkloadResult]:
        """Yield results as they arrive."""
        encode: dict[Workload, Spread | None] = {}
        for result in super().measure(cases):
            values = {field.name: getattr(result, field.name) for field in fields(result)}
            if not result.skipped:
                if result.workload not in encode:
                    encode[result.workload] = self._time_encoder(result.workload)
                values["encode_seconds"] = encode[result.workload]
            yield ImageResult(**values)

    def _time_encoder(self, workload: Workload) -> Spread | None:
        """Return the seconds to encode the image of a prefix."""
        assert isinstance(workload, ImageWorkload) and self.llm is not None
        tower, encoder_cache = self.model.tower, self.llm.engine.encoder_cache
        if tower is None or encoder_cache is None:
            return None
        (image, _), *_ = encoder_cache.table.pieces(np.array([workload.image_id]))
        inputs, seconds = encoder_cache.table.inputs(image), []
        for _ in range(1 + self.settings.repeats):
            start = time.perf_counter()
            tower.encode(inputs, image.num)  # the result is on the host, so the work has ended
            seconds.append(time.perf_counter() - start)
        return Spread.of(seconds[1:])


def image_table(results: Sequence[ImageResult]) -> PrintableTable:
    """Return a table of the times before the decode steps."""

    def milliseconds(spread: Spread | None) -> str:
        return "" if spread is None else f"{spread.median * 1e3:,.1f}"

    columns: dict[str, str | Callable[[ImageResult], str]] = {
        "Prefix": "{0.workload.prefix:,}",
        "Rows": "{0.rows:,}",
        "Mode": "{0.mode}",
        "encode ms": lambda result: milliseconds(result.encode_seconds),
        "prefill ms": lambda result: milliseconds(result.prefill_seconds),
    }
    timed = [result for result in results if not result.skipped]
    return PrintableTable.of(timed, columns, words=["Mode"])


@script
@click.option(
    "--shape",
    metavar="NAME",
    help=f"Random weights of this shape: {', '.join(VISION_SHAPES)}. Default: qwen3-vl-4b.",
)
@int_option("--image-tokens", 2000, "The prefix begins with an image of about so many tokens.")
@int_list_option("--rows", "Samples decoded at once.", default="1024")
@int_list_option("--prefix", "Prompt tokens that all share after the image.", default="2048")
@int_option("--new-tokens", 64, "Tokens of each sample.", minimum=2)
@name_list_option(
    "--modes", DECODE_MODES, "Some of all, one, off and no-attention.", default="all,off"
)
@add_options(*RUNS)
def main(
    shape: str | None,
    image_tokens: int,
    rows: list[int],
    prefix: list[int],
    new_tokens: int,
    modes: tuple[str, ...],
    **options: Any,
) -> None:
    """Samples below a prefix that begins with an image: tower, prefill and decode steps."""
    path = options["model"]
    if shape and path:
        raise InputError(
            "--shape and --model cannot be used together; remove one of the two options"
        )
    if options["quantization"] or options["ranks"] > 1:
        raise InputError(
            "--quantization and --tp are not supported with image models; remove both options"
        )
    shape = None if path else check_shape(shape or "qwen3-vl-4b")
    cases = decode_cases(rows, prefix, new_tokens, modes=modes)
    check_runs(cases, options)
    kind = {name: options[name] for name in ("dtype", "device", "kv_cache_dtype")}
    model, tokenizer = build_vision_model(shape, **kind) if shape else load_checkpoint(path, **kind)
    image = image_of(model, image_tokens)
    results, document = measure_cases(
        [add_image(image, case) for case in cases],
        model,
        tokenizer,
        options,
        note=f", below an image of {image.num:,} tokens",
        bench_type=ImageBench,
    )
    echo("")
    print_table(image_table(cast(list[ImageResult], results)))
    json_line({"bench": "decode", **document})


if __name__ == "__main__":
    main()
