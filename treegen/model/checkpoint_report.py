"""Report how treegen would run a checkpoint, from its configuration alone, or why it cannot."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from transformers import PretrainedConfig

from treegen.common.formatting import format_bytes, format_table, safe_text
from treegen.common.spec import ModelSpec
from treegen.errors import InputError, ModelError, TreegenError
from treegen.model.checkpoint.families import (
    SUPPORT_LEVELS,
    Family,
    all_families,
    get_support,
    inputs_of,
)
from treegen.model.checkpoint.files import locate, read_raw_config, weight_files
from treegen.model.checkpoint.fp4 import StoredSizes
from treegen.model.checkpoint.generation_config import format_sampling
from treegen.model.checkpoint.gguf_file import is_gguf, read_header
from treegen.model.checkpoint.quantization import check_fp4, describe_support, quantization_of
from treegen.model.config import declared_dtype, read_config, resolve_device, resolve_dtype, spec_of
from treegen.model.linear.fp4_checkpoint import (
    MXFP4_BYTES_PER_NUMBER,
    kept_in_4_bits,
    num_in_experts,
)
from treegen.model.options import EngineOptions
from treegen.model.weights import stays_fp8

IMAGE_SIZES: Final = "512x512,1024x768,2048x1536"
_WIDTH: Final = 100  # columns of a line


@dataclass(frozen=True, slots=True)
class CheckpointReport:
    """A report on how treegen would run a checkpoint."""

    name: str
    """The name that the user gave."""
    model_type: str
    """The model family; empty if it could not be read."""
    support: str
    """The support of the family, one of `families.SUPPORT_LEVELS`."""
    refused: str = ""
    """Why the checkpoint cannot be used; empty if it can."""
    spec: ModelSpec | None = None
    """The model's shape; None if it is refused."""
    dtype: str = ""
    """The type to compute in."""
    stored: str = ""
    """How the weights are quantized; empty if they are not."""
    stored_dtype: str = ""
    """The type that the configuration names for weights that are not quantized; empty if none."""
    stored_bytes: int = 0
    """Bytes of the checkpoint's weight files; 0 if they are not on this machine."""
    device: str = ""
    """The kind of device to compute on: cpu or cuda."""
    quantization: str = ""
    """"fp8" if matrices run in FP8, "nvfp4" if they run in 4 bits, "mxfp4" if experts do; else
    empty."""
    matrices: Mapping[str, StoredSizes] = field(default_factory=dict)
    """Sizes of matrices in NVFP4 and FP8, by format and whether they are kept or dequantized."""
    weight_bytes: int = 0
    """Bytes of the loaded weights, as allocated on `device`."""
    small_bytes: int = 0
    """Of these, bytes of weights in `quantization`; the others are in `dtype`."""
    latent_bytes: int = 0
    """Bytes of a token's latents, for a model whose latents cannot be cached; else 0."""
    takes: tuple[str, ...] = ()
    """The kinds of input: text, images, sound."""
    image_tokens: Mapping[tuple[int, int], int] = field(default_factory=dict)
    """Number of tokens of an image, by its width and height in pixels."""
    no_images: str = ""
    """Why images cannot be used with this checkpoint although its family takes them; empty if they
    can."""

    def __str__(self) -> str:
        """Return the report as lines of text."""
        title = f"{self.name}: {self.model_type or 'of no known family'}, {self.support}"
        if (spec := self.spec) is None:
            return safe_text(f"{title}\nrefused: {self.refused}")
        quantized = {form: f", matrices in {form}" for form in ("fp8", "nvfp4")}
        quantized["mxfp4"] = ", experts in mxfp4"
        kind = self.dtype + quantized.get(self.quantization, "")
        stored = f"; stored in {self.stored or self.stored_dtype or 'an unnamed type'}"
        stored += f", {format_bytes(self.stored_bytes)} in files" if self.stored_bytes else ""
        attending = f"{len(spec.layers)} layers attend"
        windows = sorted({window for window in spec.windows if window is not None})
        if windows:
            num_windowed = sum(window is not None for window in spec.windows)
            attending += (
                f", {num_windowed} of them to the last {' or '.join(map(str, windows))} tokens"
            )
        if spec.chunk:
            attending += f", some of them within chunks of {spec.chunk:,} tokens"
        if spec.states:
            attending += f"; {len(spec.states)} recurrent layers keep "
            attending += f"{format_bytes(spec.state_bytes)} for each text"
        index = spec.index_bytes_per_token
        size, expanded = spec.kv_bytes_per_token - index, spec.expanded_bytes_per_token - index
        cached = f"keys and values: {format_bytes(size)} a token"
        if spec.latent is not None:
            cached = (
                f"latents: {format_bytes(size)} a token, which expand to keys and values of "
                f"{format_bytes(expanded)} ({expanded / size:,.1f} times)"
            )
        if self.latent_bytes:
            times = size / self.latent_bytes
            cached += f", {times:,.1f} times its latents, which its layers do not pass to attention"
        if index:
            cached += (
                f"; index keys: {format_bytes(index)} a token, by which a token selects "
                f"{spec.index_topk:,} keys"
            )
        lines = [
            f"{title} (on a GPU {SUPPORT_LEVELS[self.support]})",
            f"weights: {spec.num_weights:,} numbers; in memory on {self.device} "
            f"{format_bytes(self.weight_bytes)} in {kind}{stored}",
            *self._memory,
            *(
                f"{key}: {size.matrices:,} matrices, {format_bytes(size.stored_bytes)} stored, "
                f"{format_bytes(size.loaded_bytes)} in memory"
                for key, size in self.matrices.items()
            ),
            attending,
            f"{cached}; context {spec.context_length:,} tokens, vocabulary {spec.vocab_size:,}",
        ]
        lines.append(f"takes: {', '.join(self.takes)}{self._images}")
        if spec.recommended:
            lines.append(f"recommended sampling: {format_sampling(dict(spec.recommended))}")
        if spec.recommended_note:
            lines.append(spec.recommended_note)
        if spec.unreached:
            takes_images = "images" in self.takes
            why = "without --images" if takes_images else "because text does not reach them"
            lines.append(f"left out, {why}: {', '.join(spec.unreached)}")
        return safe_text("\n".join(lines))

    @property
    def _memory(self) -> list[str]:
        """A line about how much of the memory is quantized; empty if no weights are."""
        if self.small_bytes:
            unquantized = format_bytes(self.weight_bytes - self.small_bytes)
            return [
                f"of this memory: {format_bytes(self.small_bytes)} in {self.quantization}, "
                f"{unquantized} in {self.dtype}"
            ]
        if self.stored:
            return [f"of this memory: nothing stays quantized, all is dequantized to {self.dtype}"]
        return []

    @property
    def _images(self) -> str:
        if self.no_images:
            return f"; images cannot be used: {self.no_images}"
        if not self.image_tokens:
            return ""
        sizes = (f"{w} x {h} pixels {num:,}" for (w, h), num in self.image_tokens.items())
        return f"; tokens of an image: {', '.join(sizes)}"

    @property
    def document(self) -> dict[str, Any]:
        """The report as a JSON object."""
        document: dict[str, Any] = {
            "name": self.name,
            "type": self.model_type,
            "way": self.support,
            "refused": self.refused or None,
        }
        if (spec := self.spec) is None:
            return document
        return document | {
            "dtype": self.dtype,
            "stored": self.stored or self.stored_dtype or None,
            "stored_bytes": self.stored_bytes or None,
            "device": self.device,
            "quantization": self.quantization or None,
            "weights": spec.num_weights,
            "weight_bytes": self.weight_bytes,
            "quantized_bytes": self.small_bytes,
            "matrices": {key: size._asdict() for key, size in self.matrices.items()} or None,
            "layers": len(spec.layers),
            "windows": sorted({window for window in spec.windows if window is not None}),
            "chunk": spec.chunk,
            "recurrent_layers": len(spec.states),
            "kv_bytes_per_token": spec.kv_bytes_per_token,
            "index_bytes_per_token": spec.index_bytes_per_token or None,
            "index_topk": spec.index_topk or None,
            "latents": spec.latent is not None,
            "expanded_bytes_per_token": spec.expanded_bytes_per_token,
            "latent_bytes_not_kept": self.latent_bytes or None,
            "state_bytes": spec.state_bytes,
            "context_length": spec.context_length,
            "vocab_size": spec.vocab_size,
            "unreached": list(spec.unreached),
            "recommended": dict(spec.recommended),
            "takes": list(self.takes),
            "image_tokens": [
                {"width": width, "height": height, "tokens": num}
                for (width, height), num in self.image_tokens.items()
            ],
            "no_images": self.no_images or None,
        }


def inspect_checkpoint(
    options: EngineOptions, image_sizes: Sequence[tuple[int, int]] = ()
) -> CheckpointReport:
    """Report how a checkpoint would run with these options, without loading its weights.

    Args:
        options: The model and its options.
        image_sizes: Widths and heights in pixels for which to report the number of image tokens.

    Raises:
        ModelError: there is no such checkpoint, or its configuration cannot be read.
        InputError: the dtype or the device cannot be used.
    """
    device = resolve_device(options.device)
    directory = locate(options.model, options.revision, weights=False)
    model_type, stored = "", ""
    if is_gguf(directory):
        header = read_header(directory)
        stored = "" if header.is_plain else f"{header.stores} (GGUF)"
    else:
        model_type = str(read_raw_config(directory).get("model_type", ""))
    try:
        config = read_config(options.model, directory, **options.source)
        model_type = config.model_type
        info = quantization_of(config)
        dtype = resolve_dtype(options.dtype, config, device)
        spec = spec_of(
            options.model,
            directory,
            config,
            dtype,
            kv_cache_dtype=options.kv_cache_dtype,
            trust_remote_code=options.trust_remote_code,
        )
        quantized = _find_quantization(options, directory, config, spec, device, dtype)
    except ModelError as error:
        support = get_support(model_type) if model_type else "refused"
        return CheckpointReport(options.model, model_type, support, refused=str(error))
    takes, image_tokens, no_images = inputs_of(config.model_type), {}, ""
    if "images" in takes:
        try:
            image_tokens = _image_tokens(options, directory, config, spec, image_sizes)
        except TreegenError as error:
            takes, no_images = tuple(kind for kind in takes if kind != "images"), str(error)
    files = weight_files(directory)
    are_here = all(file.is_file() for file in files)
    return CheckpointReport(
        name=options.model,
        model_type=model_type,
        support=get_support(model_type),
        spec=spec,
        dtype=str(dtype).removeprefix("torch."),
        stored=info.stores if info is not None else stored,
        stored_dtype=str(declared_dtype(config) or "").removeprefix("torch."),
        stored_bytes=sum(file.stat().st_size for file in files) if are_here else 0,
        device=device.type,
        small_bytes=quantized.num_bytes,
        quantization=quantized.form,
        matrices=quantized.matrices,
        weight_bytes=quantized.num_bytes + (spec.num_weights - quantized.numbers) * dtype.itemsize,
        latent_bytes=_latent_bytes(config, spec),
        takes=takes,
        image_tokens=image_tokens,
        no_images=no_images,
    )


class _Quantized(NamedTuple):
    """The weights that are quantized in memory."""

    form: str
    """Their format; empty for none."""
    numbers: int
    num_bytes: int
    matrices: Mapping[str, StoredSizes]
    """Sizes of matrices in NVFP4 and FP8, by format and whether they are kept or dequantized."""


def _find_quantization(
    options: EngineOptions,
    directory: Path,
    config: PretrainedConfig,
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
) -> _Quantized:
    """Return which weights are quantized in memory.

    Raises:
        ModelError: stored matrices do not fit together, or differ from what config.json says.
        InputError: the checkpoint does not store the format that the options name.
    """
    info, quantization = quantization_of(config), options.loading()["quantization"]
    stays = stays_fp8(info, quantization, device)
    in_fp8 = quantization == "fp8" or stays
    small, small_bytes = (spec.num_in_linears,) * 2 if in_fp8 else (0, 0)
    four_bits = kept_in_4_bits(config, spec.num_in_linears, info, quantization, device, dtype)
    form = four_bits or ("fp8" if in_fp8 else "")
    if four_bits == "mxfp4":
        small = num_in_experts(config)
        small_bytes = int(small * MXFP4_BYTES_PER_NUMBER)
    if info is None or not info.is_fp4:
        return _Quantized(form, small, small_bytes, {})
    kept_formats = ["NVFP4"] * (four_bits == "nvfp4") + ["FP8"] * stays
    files, matrices = weight_files(directory), dict[str, StoredSizes]()
    if files and all(file.is_file() for file in files):
        matrices = check_fp4(directory, config).sizes(kept_formats, dtype.itemsize)
    if four_bits and not matrices:  # the weight files are not on this machine
        small, small_bytes = spec.num_in_linears, spec.num_in_linears * 9 // 16
    elif quantization != "fp8":
        saved = [size for key, size in matrices.items() if key.endswith("kept")]
        small = sum(size.numbers for size in saved)
        small_bytes = sum(size.loaded_bytes for size in saved)
    return _Quantized(form, small, small_bytes, matrices)


def parse_image_sizes(text: str) -> list[tuple[int, int]]:
    """Parse widths and heights in pixels, such as "1024x768,512x512".

    Raises:
        InputError: the text is not a list of sizes, or a size has more pixels than an image may
            have.
    """
    from treegen.prompts.images.loading import MAX_PIXELS

    sizes = []
    for word in text.split(","):
        parts = re.fullmatch(r"\s*([1-9]\d{0,4})x([1-9]\d{0,4})\s*", word)
        if parts is None or int(parts[1]) * int(parts[2]) > MAX_PIXELS:
            raise InputError(
                "--image-size must be sizes such as 1024x768, separated by commas, with at "
                f"most {MAX_PIXELS:,} pixels each, got {text!r:.80}"
            )
        sizes.append((int(parts[1]), int(parts[2])))
    return sizes


def _image_tokens(
    options: EngineOptions,
    directory: Path,
    config: PretrainedConfig,
    spec: ModelSpec,
    sizes: Sequence[tuple[int, int]],
) -> dict[tuple[int, int], int]:
    """Return the number of tokens of images of these sizes, from the model's own processor.

    Raises:
        TreegenError: the processor cannot be loaded, or cannot take such an image.
    """
    # Pillow and the processor take seconds to import, and most models need neither.
    from treegen.model.tokenizer import load_tokenizer
    from treegen.model.vision import load_processor

    tokenizer = load_tokenizer(options.model, **options.source)
    table = load_processor(directory, config, tokenizer).table(spec.vocab_size)
    try:
        from PIL import Image
    except ImportError:
        raise InputError(
            "images require Pillow; install the package with pip install pillow"
        ) from None
    return {size: table.add(Image.new("RGB", size)).num for size in sizes}


def _latent_bytes(config: PretrainedConfig, spec: ModelSpec) -> int:
    """Return the bytes of a token's latents if the layers do not pass them on; else 0."""
    text = config.get_text_config(decoder=True)
    rank, rope = (getattr(text, name, None) for name in ("kv_lora_rank", "qk_rope_head_dim"))
    if not rank or rope is None or any(layer.latent is not None for layer in spec.layers):
        return 0
    return int(rank + rope) * len(spec.layers) * spec.itemsize


@dataclass(frozen=True, slots=True)
class FamilyReport:
    """A report on which model families run and how, and which are refused and why."""

    families: Sequence[Family]
    """The families of the installed transformers."""
    weights: Mapping[str, str]
    """Formats of quantized weights, and how treegen loads each."""

    @staticmethod
    def of_installed() -> FamilyReport:
        """Return the report for the installed transformers."""
        return FamilyReport(all_families(), describe_support())

    def __str__(self) -> str:
        """Return the report as lines of text."""
        counts = [
            [level, str(sum(family.support == level for family in self.families)), how]
            for level, how in SUPPORT_LEVELS.items()
        ]
        lines = [format_table(["Families", "Number", "On a GPU they run"], counts, right=(1,)), ""]
        for level in SUPPORT_LEVELS:
            families = [family for family in self.families if family.support == level]
            for why in sorted({family.why for family in families}):
                names = ", ".join(family.model_type for family in families if family.why == why)
                lines += [f"{level}{': ' + why if why else ''}", _wrap_text(names), ""]
        for kind in ("images", "sound"):
            if names := ", ".join(
                family.model_type for family in self.families if kind in family.takes
            ):
                lines += [f"Given {kind} too", _wrap_text(names), ""]
        lines.append("Weights that are quantized")
        return "\n".join([*lines, *(_wrap_text(f"{a}: {b}") for a, b in self.weights.items())])

    @property
    def document(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return {
            "families": [
                {
                    "type": family.model_type,
                    "way": family.support,
                    "takes": list(family.takes),
                    "why": family.why or None,
                }
                for family in self.families
            ],
            "weights": [{"stored": a, "becomes": b} for a, b in self.weights.items()],
        }


def _wrap_text(text: str) -> str:
    return textwrap.fill(
        text, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
