"""Load the tokenizer and the image processor of a model."""

import os
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treegen.common.files.regular_files import read_text
from treegen.errors import InputError, ModelError
from treegen.model.checkpoint.files import (
    TOKENIZER_FILES,
    check_trust,
    locate,
    read_object,
    summarize_error,
)
from treegen.model.checkpoint.gguf_file import gguf_arguments
from treegen.model.checkpoint.tokenizer_fields import check_fields, is_length, is_template
from treegen.model.checkpoint.tokenizer_growth import check_growth
from treegen.model.config import read_config
from treegen.model.options import EngineOptions
from treegen.model.vision.processor import Processor, load_processor


def load_tokenizer(
    path: str | os.PathLike[str],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    with_config: bool = True,
    chat_template: str | None = None,
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        path: A directory, a GGUF file or a hub name.
        revision: The branch, tag or commit of a model on the hub.
        trust_remote_code: Whether code of the checkpoint itself may run.
        with_config: Whether to also refuse code that config.json names, not only code that the
            tokenizer's own settings name.
        chat_template: A chat template or a file with one, which replaces the tokenizer's own.

    Raises:
        InputError: the chat template cannot be read.
        ModelError: there is no tokenizer, or it cannot be loaded.
    """
    template = read_chat_template(chat_template)
    directory = locate(path, revision, weights=False)
    local = Path(path).expanduser().is_dir()
    for name in ("tokenizer_config.json", "config.json"):
        if (directory / name).is_file() and (with_config or name != "config.json"):
            settings = read_object(directory / name)
            check_trust(settings, name, revision, local=local, trust=trust_remote_code)
    in_one = gguf_arguments(directory)
    if not in_one and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"{directory} has no tokenizer (tokenizer.json); save one there")
    if not in_one:
        check_growth(directory)
    try:
        # AutoTokenizer is untyped.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory.parent if in_one else directory,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **in_one,
        )
        if tokenizer.is_fast:
            tokenizer("a", verbose=False)  # also applies what tokenizer.json adds to a text
    except BaseException as error:
        # A panic in the library of fast tokenizers is not raised as an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if with_config and not in_one and (directory / "config.json").is_file():
            # transformers reads config.json for a tokenizer too, so the error may be there.
            read_config(path, directory, revision=revision, trust_remote_code=trust_remote_code)
        check_fields(directory)
        raise ModelError(
            f"the tokenizer in {directory} cannot be loaded: {summarize_error(error)}; mend "
            "its files, or "
            "download them again"
        ) from None
    # Otherwise the error would occur later, when a text is encoded or a chat is rendered.
    if not is_template(tokenizer.chat_template) or not is_length(tokenizer.model_max_length):
        check_fields(directory)
    if not len(tokenizer):
        raise ModelError(f"the tokenizer in {directory} has no tokens; save it again")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def read_chat_template(text_or_file: str | None) -> str | None:
    """Return a chat template.

    Args:
        text_or_file: The template itself, or the path of a file with it; None for none.

    Raises:
        InputError: it is neither a template nor a readable file.
    """
    if text_or_file is None or "{" in text_or_file:
        return text_or_file
    try:
        return read_text(text_or_file)
    except (OSError, ValueError) as error:
        raise InputError(
            f"chat_template {text_or_file!r} is no template and no file: {error}; give one of them"
        ) from error


def load_image_processor(options: EngineOptions, tokenizer: PreTrainedTokenizerBase) -> Processor:
    """Load the image processor of the model that options name, without reading weights.

    Raises:
        ModelError: as `load_processor` does.
    """
    directory = locate(options.model, options.revision, weights=False)
    config = read_config(
        options.model,
        directory,
        revision=options.revision,
        trust_remote_code=options.trust_remote_code,
    )
    return load_processor(directory, config, tokenizer)
