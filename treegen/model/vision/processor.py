"""The processor that lies beside a model, for images alone."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from transformers import AutoImageProcessor, PretrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from treegen.errors import ModelError
from treegen.model.checkpoint.families import refuse_images, sees_ahead
from treegen.model.checkpoint.files import read_object, summarize_error
from treegen.prompts.images.table import Ahead, ImageTable

_COUNTS: Final = ("num_additional_image_tokens", "image_seq_len", "image_seq_length")
_MOST_TOKENS: Final = 2**16
"""Of an image, as settings may say; placeholders are written for each before anything is read."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor of transformers, and the token id in the places of images.

    sees_ahead: in which layers tokens of images see those after them; None for no layer.
    """

    processor: Any
    placeholder: int
    sees_ahead: Ahead | None = None

    def table(self, vocab_size: int) -> ImageTable:
        """The images of a model with so many token ids, none yet."""
        return ImageTable(self.processor, self.placeholder, vocab_size, sees_ahead=self.sees_ahead)


def load_processor(
    directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> Processor:
    """The processor that lies in a model's directory.

    Raises:
        ModelError: images cannot be given to models of this family, or the checkpoint has no
            processor for them.
    """
    refuse_images(config)
    return Processor(
        _load(directory, config, tokenizer), placeholder_of(config), sees_ahead(config)
    )


def placeholder_of(config: PretrainedConfig) -> int:
    """The token id in the places of images."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(found := getattr(config, name, None), int):
            return found
    raise ModelError(f"config.json of {config.model_type} has no image_token_id; add it")


def _load(directory: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> Any:
    kind: Any = PROCESSOR_MAPPING[type(config)]

    class OfImages(kind):  # type: ignore[misc]
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
        made = OfImages.from_pretrained(directory, local_files_only=True)
        # An encoding tokenizer has settings that are not for two threads at once.
        made.tokenizer = copy.deepcopy(tokenizer)
        return made
    except Exception as error:
        raise ModelError(
            f"the image processor in {directory} cannot be loaded: {summarize_error(error)}; "
            "download its "
            "preprocessor_config.json again"
        ) from None


def _check_counts(directory: Path) -> None:
    """Raise ModelError for a number of tokens of an image that no processor has."""
    file = directory / "processor_config.json"
    settings = read_object(file) if file.is_file() else {}
    for name in _COUNTS:
        if (value := settings.get(name)) is None:
            continue
        if type(value) is not int or not 0 <= value <= _MOST_TOKENS:
            raise ModelError(
                f"{file}: {name} is {value!r:.60}, not a number of tokens; mend it, or download "
                "the file again"
            )
