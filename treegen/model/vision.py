"""The vision part of a model: its image processor, and the tower that encodes images.

transformers' own class for the whole model builds the inputs of its language model: token
embeddings with the tower's outputs in place of images, and more in some families. To encode an
image, the class runs on the image's placeholders alone, up to the call of its language model, whose
inputs are kept. In a later pass, a hook inserts these rows into that call. Phi-4-multimodal has no
such call: a module inside of its language model adds images to the embeddings.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from treegen.common.device import use_device, without_autocast
from treegen.common.formatting import summarize_error
from treegen.errors import ModelError
from treegen.model.batch import ImageRows
from treegen.model.checkpoint.families import refuse_images, sees_ahead
from treegen.model.checkpoint.files import check_fields, read_object
from treegen.prompts.images.table import Ahead, ImageTable

_COUNTS: Final = ("num_additional_image_tokens", "image_seq_len", "image_seq_length")
_NOT_FOR_MODEL: Final = ("num_img_tokens",)
"""Outputs of processors that are no inputs of the model."""
_MAX_TOKENS: Final = 2**16
"""Maximum tokens per image in settings, because placeholders are made before images are read."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A transformers processor, and the placeholder token of images."""

    processor: Any
    """The transformers processor."""
    placeholder: int
    """The token id of placeholders."""
    sees_ahead: Ahead | None = None
    """The layers in which image tokens attend to later image tokens; None for no layer."""

    def table(self, vocab_size: int) -> ImageTable:
        """Return an empty table of images for a model with `vocab_size` token ids."""
        return ImageTable(self.processor, self.placeholder, vocab_size, sees_ahead=self.sees_ahead)

    def enable_images(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, *, keep_template: bool = False
    ) -> ImageTable:
        """Give a tokenizer the processor's chat template, if it has one; return an empty table.

        Args:
            tokenizer: The model's tokenizer.
            vocab_size: The size of the model's vocabulary.
            keep_template: Whether the tokenizer has a chat template that the user chose.
        """
        table = self.table(vocab_size)
        if table.chat_template and not keep_template:
            tokenizer.chat_template = table.chat_template
        return table


def load_processor(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Processor:
    """Load the image processor in a model's directory.

    Args:
        directory: The model's directory.
        config: Its configuration.
        tokenizer: Its tokenizer.

    Raises:
        ModelError: treegen does not support images with this family, or the checkpoint has no image
            processor.
    """
    refuse_images(config)
    return Processor(
        _load(directory, config, tokenizer), placeholder_of(config), sees_ahead(config)
    )


def placeholder_of(config: PretrainedConfig) -> int:
    """Return the token id of image placeholders."""
    for part in (config, getattr(config, "vision_config", None)):
        for name in ("image_token_id", "image_token_index"):
            if isinstance(token_id := getattr(part, name, None), int):
                return token_id
    raise ModelError(f"config.json of {config.model_type} has no image_token_id; add this field")


def _load(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    kind: Any = PROCESSOR_MAPPING[type(config)]

    class ImageProcessor(kind):  # type: ignore[misc]
        """The family's own processor without its part for videos, which needs other packages."""

        @classmethod
        def _get_arguments_from_pretrained(cls, *_: Any, **__: Any) -> list[Any]:
            images = AutoImageProcessor.from_pretrained(directory, local_files_only=True)
            parts = {"image_processor": images, "tokenizer": tokenizer}
            return [parts.get(name) for name in cls.get_attributes()]

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            if argument is None:
                return None
            return super().check_argument_for_proper_class(argument_name, argument)

    _check_counts(directory)
    try:
        processor = ImageProcessor.from_pretrained(directory, local_files_only=True)
        # Copy the tokenizer, because its settings while encoding are not thread-safe.
        processor.tokenizer = copy.deepcopy(tokenizer)
        return processor
    except Exception as error:
        raise ModelError(
            f"the image processor in {directory} cannot be loaded: {summarize_error(error)}; "
            "download its preprocessor_config.json again"
        ) from None


def _check_counts(directory: Path) -> None:
    """Raise ModelError for an invalid number of tokens per image in the settings."""
    file = directory / "processor_config.json"
    settings = read_object(file) if file.is_file() else {}
    checks = dict.fromkeys(_COUNTS, ("a number of tokens", _is_count))
    check_fields(file, settings, checks, "fix the file, or download the file again")


def _is_count(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value <= _MAX_TOKENS)


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """The inputs of a language model for an image with N placeholders."""

    rows_ND: Tensor
    """The embeddings of the placeholders."""
    added: tuple[Tensor, ...] = ()
    """[N, D] each, the numbers to add after each of the first layers (deep-stack)."""

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (self.rows_ND, *self.added))


class _StopForward(Exception):
    """Ends a pass at the call of the language model; it has the inputs of that call."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        super().__init__()
        self.inputs = inputs


@contextmanager
def _exact_float32_convolutions() -> Iterator[None]:
    """Compute float32 convolutions in float32; by default cuDNN uses TF32 for them.

    With TF32 in the first layer of a tower, log-probabilities differ by up to 2e-3.
    """
    cudnn: Any = torch.backends.cudnn  # its settings are not typed
    conv = cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before


class VisionTower:
    """Encodes images with a model's own parts, and inserts the embeddings into its passes.

    Attributes:
        has_axes: Whether image positions have several axes.
        num_encoded: Images encoded so far.
    """

    def __init__(self, module: PreTrainedModel, placeholder: int) -> None:
        """Hook the call of the model's language model.

        Args:
            module: The transformers model.
            placeholder: The token id of image placeholders.
        """
        self._module, self._placeholder = module, placeholder
        self._images: ImageRows | None = None
        self._captures = False
        self.num_encoded = 0
        base = module.base_model
        if isinstance(embedder := getattr(base, "embed_tokens_extend", None), nn.Module):
            embedder.register_forward_hook(self._on_embedded)
        else:
            decoder: nn.Module = module.get_decoder()
            decoder.register_forward_pre_hook(self._on_call, with_kwargs=True)
        self._rope_index = getattr(base, "get_rope_index", None)
        self._takes_kinds = "mm_token_type_ids" in inspect.signature(module.forward).parameters

    @property
    def has_axes(self) -> bool:
        """Whether image positions have several axes."""
        return self._rope_index is not None

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, Any], num: int) -> ImageEmbedding:
        """Encode an image with `num` placeholders; the result is on the host.

        Args:
            inputs: The processor's outputs for the image.
            num: The number of its placeholders.

        Raises:
            ModelError: the model cannot encode the image.
        """
        self.num_encoded += 1
        self._captures = True
        try:
            device = self._module.device
            with use_device(device), without_autocast(device), _exact_float32_convolutions():
                self._module(**self._prepare_inputs(inputs, num), use_cache=False)
        except _StopForward as error:
            decoder_inputs = error.inputs
        except ValueError as error:
            raise ModelError(
                f"the model cannot encode an image: {summarize_error(error)}; "
                "processor_config.json, preprocessor_config.json and config.json may belong to "
                "different models; download all three again"
            ) from None
        else:
            raise ModelError("the model does not call its language model")
        finally:
            self._captures = False
        rows_ND = decoder_inputs["inputs_embeds"][0]
        added = decoder_inputs.get("deepstack_visual_embeds") or ()
        return ImageEmbedding(rows_ND.cpu(), tuple(tensor.cpu() for tensor in added))

    def positions(self, inputs: Mapping[str, Any], num: int) -> NDArray[np.int64]:
        """Return the positions of the tokens of an image alone, [3, num], starting at 0."""
        assert self._rope_index is not None
        grids = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        ids = torch.full((1, num), self._placeholder)
        position_ids, _ = self._rope_index(
            input_ids=ids, mm_token_type_ids=torch.ones_like(ids), **grids
        )
        positions: NDArray[np.int64] = position_ids[:, 0].cpu().numpy().astype(np.int64)
        return positions

    def set_images(self, images: ImageRows | None) -> None:
        """Set the images of the next pass; None for none."""
        self._images = images

    def _prepare_inputs(self, inputs: Mapping[str, Any], num: int) -> dict[str, Any]:
        device, dtype = self._module.device, self._module.dtype
        ids = torch.full((1, num), self._placeholder, device=device)
        prepared: dict[str, Any] = {"input_ids": ids}
        for name, value in inputs.items():
            if name in _NOT_FOR_MODEL:
                continue
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None)
            prepared[name] = value
        if self._takes_kinds:
            prepared["mm_token_type_ids"] = torch.ones_like(ids)
        return prepared

    def _on_call(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Capture the inputs of the language model, or insert images into them."""
        if self._captures:
            raise _StopForward(kwargs)
        images = self._images
        if images is None:
            return None
        embeds_1TD = _insert(kwargs["inputs_embeds"], images)
        changed = {**kwargs, "inputs_embeds": embeds_1TD}
        if images.added:
            mask_1T = torch.zeros(embeds_1TD.shape[:2], dtype=torch.bool, device=embeds_1TD.device)
            mask_1T[0, images.indices_I] = True
            changed["visual_pos_masks"] = mask_1T
            changed["deepstack_visual_embeds"] = list(images.added)
        return args, changed

    def _on_embedded(
        self, _module: nn.Module, _args: tuple[Any, ...], embeds_1TD: Tensor
    ) -> Tensor | None:
        """Capture embeddings with an image, or insert images into them."""
        if self._captures:
            raise _StopForward({"inputs_embeds": embeds_1TD})
        return None if self._images is None else _insert(embeds_1TD, self._images)


def _insert(embeds_1TD: Tensor, images: ImageRows) -> Tensor:
    """Return a copy of token embeddings with those of image tokens replaced."""
    changed = embeds_1TD.clone()
    changed[0, images.indices_I] = images.rows_ID.to(embeds_1TD.dtype)
    return changed
