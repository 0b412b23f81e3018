"""Load the tokenizer and the image processor of a model, and check the tokenizer's files.

The library of fast tokenizers aborts the whole process when memory runs out. A few replacements in
a row can make a short text larger than any memory, so they are checked before the tokenizer is
used. If a tokenizer fails, the error names the field of its settings with an invalid value.
"""

import base64
import binascii
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from treegen.common.files import read_text
from treegen.common.formatting import summarize_error
from treegen.errors import InputError, ModelError, arg
from treegen.model.checkpoint.files import (
    TOKENIZER_FILES,
    FieldChecks,
    check_fields,
    check_trust,
    locate,
    read_object,
)
from treegen.model.checkpoint.gguf_file import gguf_arguments
from treegen.model.config import read_config
from treegen.model.options import EngineOptions
from treegen.model.vision import Processor, load_processor


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
    gguf = gguf_arguments(directory)
    if not gguf and not any((directory / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(
            f"{directory} has no tokenizer (tokenizer.json); save a tokenizer in this directory"
        )
    if not gguf:
        check_growth(directory)
    try:
        # AutoTokenizer is untyped.
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            directory.parent if gguf else directory,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            **gguf,
        )
        if tokenizer.is_fast:
            tokenizer("a", verbose=False)  # also runs the post-processor, which may fail
    except BaseException as error:
        # A panic in the library of fast tokenizers is not raised as an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if with_config and not gguf and (directory / "config.json").is_file():
            # transformers reads config.json for a tokenizer too, so the error may be there.
            read_config(path, directory, revision=revision, trust_remote_code=trust_remote_code)
        check_tokenizer_fields(directory)
        raise ModelError(
            f"the tokenizer in {directory} cannot be loaded: {summarize_error(error)}; fix its "
            "files, or download them again"
        ) from None
    # Otherwise the error would occur later, when a text is encoded or a chat is rendered.
    if not is_template(tokenizer.chat_template) or not is_length(tokenizer.model_max_length):
        check_tokenizer_fields(directory)
    if not len(tokenizer):
        raise ModelError(f"the tokenizer in {directory} has no tokens; save the tokenizer again")
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
            f"{arg('chat_template')} must be a template or the path of a file, got "
            f"{text_or_file!r:.80}, which cannot be read: {error}; pass a file of Jinja text"
        ) from error


def load_image_processor(options: EngineOptions, tokenizer: PreTrainedTokenizerBase) -> Processor:
    """Load the image processor of the model that options name, without reading weights.

    Raises:
        ModelError: as `load_processor` does.
    """
    directory = locate(options.model, options.revision, weights=False)
    config = read_config(options.model, directory, **options.source)
    return load_processor(directory, config, tokenizer)


def is_length(value: Any) -> bool:
    """Return whether a value is valid for `model_max_length`; if not set, it is 1e30."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return value is None or (number and value >= 0)


def _is_token(value: Any) -> bool:
    text = value.get("content") if isinstance(value, dict) else value
    is_text = isinstance(text, str) and not any("\ud800" <= char <= "\udfff" for char in text)
    return value is None or is_text


def _are_tokens(value: Any) -> bool:
    tokens = list(value.values()) if isinstance(value, dict) else value
    return value is None or (isinstance(tokens, list) and all(t and _is_token(t) for t in tokens))


def _are_added_tokens(value: Any) -> bool:
    if not isinstance(value, dict) or not all(key.isdecimal() for key in value):
        return False
    return all(isinstance(token, dict) and _is_token(token) for token in value.values())


def is_template(value: Any) -> bool:
    """Return whether a value is valid for `chat_template`."""
    if isinstance(value, dict):
        return all(isinstance(text, str) for text in value.values())
    if isinstance(value, list):
        names = ("name", "template")
        return all(
            isinstance(t, dict) and all(isinstance(t.get(n), str) for n in names) for t in value
        )
    return value is None or isinstance(value, str)


_TOKEN: Final = ("a token or an object with its content", _is_token)
_TOKENS: Final = ("a list or an object of tokens", _are_tokens)
_SIDE: Final = ('"left" or "right"', lambda value: value in ("left", "right"))
_SPECIAL_TOKENS: Final = {
    f"{name}_token": _TOKEN for name in ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
}
_FIELDS: Final[FieldChecks] = {
    **_SPECIAL_TOKENS,
    "model_max_length": ("a number of tokens", is_length),
    "added_tokens_decoder": ("an object that maps ids to tokens", _are_added_tokens),
    "additional_special_tokens": (
        "a list of tokens",
        lambda value: not isinstance(value, dict) and _are_tokens(value),
    ),
    "extra_special_tokens": _TOKENS,
    "chat_template": ("a template or a list of named templates", is_template),
    "padding_side": _SIDE,
    "truncation_side": _SIDE,
    "split_special_tokens": ("true or false", lambda value: isinstance(value, bool)),
    "model_input_names": (
        "a list of names",
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
    ),
    "auto_map": ("an object", lambda value: isinstance(value, dict)),
    "tokenizer_class": ("a name", lambda value: value is None or isinstance(value, str)),
}


def check_tokenizer_fields(directory: Path) -> None:
    """Raise ModelError that names the first field of a tokenizer's settings with an invalid value.

    Call this for a tokenizer that fails. A tokenizer that never reads the field may work in spite
    of such a value.
    """
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        settings: dict[str, Any] = {}
        with suppress(ModelError):  # no such file, or its error is reported elsewhere
            settings = read_object(directory / name)
        advice = "fix the file, or download the file again"
        check_fields(directory / name, settings, _FIELDS, advice)


MAX_GROWTH_FACTOR: Final = 256
"""Maximum factor by which normalizing or decoding may lengthen a text, apart from Unicode's own."""
MAX_ADDED_CHARS: Final = 4096
"""Maximum characters that normalizing may prepend, and in a prefix or suffix of word parts."""
_MAX_COPIES: Final = 8  # of a text in the result with special tokens
_PARTS: Final = ("normalizers", "decoders", "processors")
_AFFIXES: Final = ("continuing_subword_prefix", "end_of_word_suffix")


def check_growth(directory: Path) -> None:
    """Raise ModelError for a tokenizer.json that would make a text grow without bound.

    Args:
        directory: The directory of the tokenizer's files. One without a tokenizer.json is accepted.

    Raises:
        ModelError: A text would grow.
    """
    file = directory / "tokenizer.json"
    if not file.is_file():
        return
    try:
        settings = read_object(file)
    except ModelError:  # the library's own error is clearer
        return
    for name in ("normalizer", "decoder"):
        factor, added = _bound_growth(settings.get(name))
        if factor > MAX_GROWTH_FACTOR or added > MAX_ADDED_CHARS:
            raise ModelError(
                f"{file}: the {name} may lengthen a text {factor:,.3g} times and add "
                f"{added:,.3g} characters, but at most {MAX_GROWTH_FACTOR} times and "
                f"{MAX_ADDED_CHARS:,} characters are supported; use another tokenizer"
            )
    copies = max((_copies(step) for step in _steps(settings.get("post_processor"))), default=1)
    if copies > _MAX_COPIES:
        raise ModelError(
            f"{file}: the post_processor repeats a text {copies:,} times, but at most "
            f"{_MAX_COPIES} times are supported; use another tokenizer"
        )
    model = settings.get("model")
    affixes = {name: model.get(name) for name in _AFFIXES} if isinstance(model, Mapping) else {}
    for name, text in affixes.items():
        if isinstance(text, str) and len(text) > MAX_ADDED_CHARS:
            raise ModelError(
                f"{file}: {name} must have at most {MAX_ADDED_CHARS:,} characters, got "
                f"{len(text):,}; use another tokenizer"
            )


def _steps(settings: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the steps of a normalizer, a decoder or a post-processor, in order."""
    stack = [settings]
    while stack:
        step = stack.pop()
        if not isinstance(step, Mapping):
            continue
        inner = [
            child for part in _PARTS if isinstance(step.get(part), list) for child in step[part]
        ]
        if inner:
            stack += reversed(inner)
        else:
            yield step


def _bound_growth(settings: Any) -> tuple[float, float]:
    """Return the maximum factor by which a text may grow, and how many characters are added."""
    factor, added = 1.0, 0.0
    for step in _steps(settings):
        step_factor = _factor(step)
        factor, added = factor * step_factor, added * step_factor
        prepended = step.get("prepend")
        added += len(prepended) if isinstance(prepended, str) else 0
    return factor, added


def _factor(step: Mapping[str, Any]) -> float:
    """Return the maximum factor by which one step may lengthen a text."""
    content, pattern = step.get("content"), step.get("pattern")
    if isinstance(content, str) and pattern is not None:
        text = pattern.get("String") if isinstance(pattern, Mapping) else pattern
        if isinstance(text, str) and text:
            return max(1.0, len(content) / len(text))
        return 1.0 + len(content)  # a regular expression may match between any two characters
    charsmap = step.get("precompiled_charsmap")
    if isinstance(charsmap, str):
        try:
            data = base64.b64decode(charsmap)
        except (binascii.Error, ValueError):
            return 1.0  # the library refuses it
        # The data is the length of a table, the table, and replacements separated by zeros.
        replaced = data[4 + int.from_bytes(data[:4], "little") :]
        return float(max(map(len, replaced.split(b"\0")), default=1) or 1)
    return 1.0


def _copies(step: Mapping[str, Any]) -> int:
    single = step.get("single")
    if not isinstance(single, list):
        return 1
    return sum(isinstance(item, Mapping) and "Sequence" in item for item in single)
