"""The image part of a model: what it makes of an image, and how that gets into a pass.

A model is run by transformers' own class for the whole of it. That class puts together what it
hands to its language model: embeddings of tokens, with the tower's output in the places of images,
and in some families more. To encode an image, the class is run on the placeholders of the image
alone, up to the call of its language model. In a pass that call gets the rows that were made then.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import PreTrainedModel

from treegen.common.device import use_device, without_autocast
from treegen.errors import ModelError
from treegen.model.batch import ImageRows
from treegen.model.checkpoint.files import summarize_error


@dataclass(frozen=True, slots=True)
class ImageEmbedding:
    """What a language model gets of an image with N placeholders.

    rows_ND: in place of their embeddings.
    added: [N, D] each, what is added after each of the first layers (deep-stack).
    """

    rows_ND: Tensor
    added: tuple[Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return sum(each.nbytes for each in (self.rows_ND, *self.added))


class _StopForward(Exception):
    """Ends a pass at the call of the language model, with what that is given."""

    def __init__(self, given: dict[str, Any]) -> None:
        super().__init__()
        self.given = given


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Keep convolutions of float32 in float32: cuDNN takes TF32 by default, as products do not.

    With TF32 in the first layer of a tower, log-probabilities are up to 2e-3 off.
    """
    cudnn: Any = torch.backends.cudnn  # whose settings are not typed
    conv = cudnn.conv
    before = conv.fp32_precision
    conv.fp32_precision = "ieee"
    try:
        yield
    finally:
        conv.fp32_precision = before


class VisionTower:
    """Encodes images with a model's own parts, and puts what they give into its passes.

    has_axes: whether images have positions of several axes.
    num_encoded: images that were encoded so far.
    """

    def __init__(self, module: PreTrainedModel, placeholder: int) -> None:
        """placeholder: the id in the places of images."""
        self._module, self._placeholder = module, placeholder
        self._of_images: ImageRows | None = None
        self._captures = False
        self.num_encoded = 0
        decoder: nn.Module = module.get_decoder()
        decoder.register_forward_pre_hook(self._on_call, with_kwargs=True)
        base = module.base_model
        self._rope_index = getattr(base, "get_rope_index", None)
        self._takes_kinds = "mm_token_type_ids" in inspect.signature(module.forward).parameters

    @property
    def has_axes(self) -> bool:
        """Whether images have positions of several axes."""
        return self._rope_index is not None

    @torch.inference_mode()
    def encode(self, inputs: Mapping[str, Any], num: int) -> ImageEmbedding:
        """Encode an image that has `num` placeholders, on the host afterwards.

        Args:
            inputs: What the processor has made of it.

        Raises:
            ModelError: the model makes nothing of it that can be used.
        """
        self.num_encoded += 1
        self._captures = True
        try:
            device = self._module.device
            with use_device(device), without_autocast(device), _whole_float32():
                self._module(**self._prepare_inputs(inputs, num), use_cache=False)
        except _StopForward as error:
            given = error.given
        except ValueError as error:
            raise ModelError(
                f"the model cannot encode an image: {summarize_error(error)}; "
                "processor_config.json, "
                "preprocessor_config.json and config.json may not be of one model: download them"
            ) from None
        else:
            raise ModelError("the model does not call its language model")
        finally:
            self._captures = False
        rows_ND = given["inputs_embeds"][0]
        added = given.get("deepstack_visual_embeds") or ()
        return ImageEmbedding(rows_ND.cpu(), tuple(each.cpu() for each in added))

    def positions(self, inputs: Mapping[str, Any], num: int) -> NDArray[np.int64]:
        """Positions of the tokens of an image alone, [3, num], from 0 on."""
        assert self._rope_index is not None
        given = {name: value for name, value in inputs.items() if name.endswith("grid_thw")}
        ids = torch.full((1, num), self._placeholder)
        found, _ = self._rope_index(input_ids=ids, mm_token_type_ids=torch.ones_like(ids), **given)
        positions: NDArray[np.int64] = found[:, 0].cpu().numpy().astype(np.int64)
        return positions

    def set_images(self, images: ImageRows | None) -> None:
        """Put images into the next pass, or none."""
        self._of_images = images

    def _prepare_inputs(self, inputs: Mapping[str, Any], num: int) -> dict[str, Any]:
        device, dtype = self._module.device, self._module.dtype
        ids = torch.full((1, num), self._placeholder, device=device)
        given: dict[str, Any] = {"input_ids": ids}
        for name, value in inputs.items():
            if isinstance(value, Tensor):
                value = value.to(device, dtype if value.is_floating_point() else None)
            given[name] = value
        if self._takes_kinds:
            given["mm_token_type_ids"] = torch.ones_like(ids)
        return given

    def _on_call(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look at or change what the language model is given."""
        if self._captures:
            raise _StopForward(kwargs)
        images = self._of_images
        if images is None:
            return None
        embeds_1TD: Tensor = kwargs["inputs_embeds"].clone()
        embeds_1TD[0, images.at_I] = images.rows_ID.to(embeds_1TD.dtype)
        changed = {**kwargs, "inputs_embeds": embeds_1TD}
        if images.added:
            mask_1T = torch.zeros(embeds_1TD.shape[:2], dtype=torch.bool, device=embeds_1TD.device)
            mask_1T[0, images.at_I] = True
            changed["visual_pos_masks"] = mask_1T
            changed["deepstack_visual_embeds"] = list(images.added)
        return args, changed
