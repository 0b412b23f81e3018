"""Load the image processor of a model."""

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
    for name in ("image_token_id", "image_token_index"):
        if isinstance(token_id := getattr(config, name, None), int):
            return token_id
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
        # Copy the tokenizer, because its settings while encoding are not thread-safe.
        made.tokenizer = copy.deepcopy(tokenizer)
        return made
    except Exception as error:
        raise ModelError(
            f"the image processor in {directory} cannot be loaded: {summarize_error(error)}; "
            "download its "
            "preprocessor_config.json again"
        ) from None


def _check_counts(directory: Path) -> None:
    """Raise ModelError for an invalid number of tokens per image in the settings."""
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
