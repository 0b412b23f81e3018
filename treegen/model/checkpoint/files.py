"""Find checkpoint files, refuse unsafe or incomplete ones, and fingerprint them.

Everything here happens before a weight is read. Weights are safetensors or GGUF only; a
configuration that would fetch code or kernels from another repository is refused.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import huggingface_hub
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from safetensors import safe_open

from treegen import demo
from treegen.common.files import (
    describe_read_error,
    open_regular,
    path_component,
    read_bytes,
    read_text,
)
from treegen.common.formatting import summarize_error
from treegen.errors import InputError, ModelError, arg
from treegen.model.checkpoint.gguf_file import is_gguf, read_header

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "tiktoken.model",
    "qwen.tiktoken",
    "vocab.json",
    "vocab.txt",
)
# Together with the files above, these decide how a text is tokenized.
TOKENIZER_SETTINGS: Final = (
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
)
_SETTINGS: Final = ("config.json", "generation_config.json", "adapter_config.json")
_PROCESSORS: Final = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "model.safetensors.index.json",
)
_UNSAFE_WEIGHTS: Final = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.msgpack", "*.h5")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_MAX_HEADER: Final = 100_000_008
"""Maximum bytes of a safetensors header with its length field, by the format."""
_SAMPLES: Final = 64
_SAMPLE_BYTES: Final = 4096


def locate(
    path: str | os.PathLike[str], revision: str | None, *, weights: bool, download: bool = True
) -> Path:
    """Return the path of a checkpoint, fetching it from the hub if it is a hub name.

    "demo" is the model bundled with treegen; ./demo is a directory of that name. Hub names are
    resolved as Hugging Face does, so HF_HUB_OFFLINE, HF_HOME and tokens apply.

    Args:
        path: A directory, a GGUF file, a hub name, or the name of a bundled model.
        revision: The branch, tag or commit of a model on the hub; None for the default branch.
        weights: Whether to fetch the weights too.
        download: Whether to fetch files that are not in the local Hugging Face cache.

    Returns:
        The directory, or the path of the GGUF file.

    Raises:
        InputError: the path is neither text nor a path object.
        ModelError: there is no such directory or file, and no such model on the hub.
    """
    if not isinstance(path, str | os.PathLike):
        raise InputError(f"a model must be a directory or a name on the hub, got {path!r:.60}")
    name = os.fspath(path)
    if name in demo.MODELS:
        return demo.model_path(name)
    directory = Path(os.path.expanduser(name))  # Path.expanduser raises if there is no such user
    if os.path.isdir(directory):  # Path.is_dir raises if the name is too long
        _refuse_gguf(directory)
        _check_regular(directory)
        return directory
    if os.path.isfile(directory):
        if is_gguf(directory):
            read_header(directory)
            return directory
        raise ModelError(
            f"{name} is a file; pass the directory that contains config.json and the weights"
        )
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name or not name:
        raise ModelError(f"model directory {name!r} does not exist; check the path")
    patterns = ["*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "*.py"]
    patterns += ["*.safetensors"] if weights else []
    try:
        snapshot = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=patterns,
            # These are second copies of the weights in vendor-specific formats.
            ignore_patterns=["*/*", "consolidated*"],
            local_files_only=not download,
        )
    except HFValidationError:
        raise ModelError(
            f"{name!r} is neither a directory nor a valid hub name; check the spelling"
        ) from None
    except LocalEntryNotFoundError:
        if not download:
            raise ModelError(
                f"{name!r} is neither a directory nor in the local Hugging Face cache; download "
                "the model first"
            ) from None
        raise ModelError(
            f"{name!r} is not a directory, not in the local Hugging Face cache, and the hub "
            "could not be reached; check the name, or download the model first"
        ) from None
    except Exception as error:
        raise ModelError(
            f"{name!r} is not a directory and could not be fetched from the hub: "
            f"{summarize_error(error)}; check the name, or download the model first"
        ) from None
    if not (Path(snapshot) / "config.json").is_file() and "gguf" in name.lower():
        raise ModelError(f"{name} has only GGUF files; download one of the files and pass its path")
    return Path(snapshot)


def _refuse_gguf(directory: Path) -> None:
    """Raise ModelError for a directory with GGUF files but without a config.json."""
    files = sorted(directory.glob("*.gguf"))
    if files and not (directory / "config.json").is_file():
        raise ModelError(
            f"{directory} has GGUF files but no config.json; pass the path of a GGUF file, such "
            f"as {files[0]}"
        )


def _check_regular(directory: Path) -> None:
    """Raise ModelError for a pipe or device in a directory, which other libraries would open."""
    try:
        irregular = [
            entry
            for entry in directory.iterdir()
            if entry.exists() and not entry.is_file() and not entry.is_dir()
        ]
    except OSError as error:
        raise ModelError(describe_read_error(directory, error)) from None
    if irregular:
        raise ModelError(f"{irregular[0]} is not a regular file but a pipe or a device; remove it")


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint.

    Raises:
        ModelError: the file cannot be read, or does not contain an object.
    """
    try:
        value = json.loads(read_text(file))
    except (ValueError, OSError) as error:
        raise ModelError(
            f"{file} cannot be read as JSON: {summarize_error(error)}; download it again"
        ) from None
    except RecursionError:
        raise ModelError(
            f"{file} cannot be read as JSON: the values are nested too deeply; download the "
            "file again"
        ) from None
    if not isinstance(value, dict):
        raise ModelError(
            f"{file} must contain a JSON object, got {type(value).__name__}; download the file "
            "again"
        )
    return value


FieldChecks = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""For fields of a file: what the value must be, and a function that checks it."""


def check_fields(file: Path, settings: Mapping[str, Any], fields: FieldChecks, advice: str) -> None:
    """Check the fields that settings have.

    Args:
        file: The file of the settings, for the message.
        settings: Its content.
        fields: The checks.
        advice: What to do about an invalid field.

    Raises:
        ModelError: a field has an invalid value.
    """
    for name, (what, is_valid) in fields.items():
        if name in settings and not is_valid(settings[name]):
            raise ModelError(f"{file}: {name} must be {what}, got {settings[name]!r:.60}; {advice}")


FLOATS: Final = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of numbers that are not quantized, as safetensors names them."""


def read_headers(file: Path) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield the name, type and shape of each tensor in a safetensors file."""
    with safe_open(file, "pt") as tensors:
        for name in tensors.keys():  # noqa: SIM118  (it is no mapping)
            part = tensors.get_slice(name)
            yield name, str(part.get_dtype()), tuple(part.get_shape())


def read_raw_config(directory: Path) -> dict[str, Any]:
    """Return the content of config.json, unchanged.

    Raises:
        ModelError: there is no config.json; the message says what the directory contains instead.
    """
    file = directory / "config.json"
    if file.is_file():
        return read_object(file)
    if (directory / "adapter_config.json").is_file():
        raise ModelError(
            f"{directory} contains an adapter, not a model; pass the base model as the model "
            "and this directory as adapter (--adapter)"
        )
    raise ModelError(
        f"{directory} has no config.json; pass a directory saved by save_pretrained, or a hub name"
    )


def check_weights(directory: Path) -> None:
    """Raise ModelError unless the directory has every safetensors file that its index names."""
    if is_gguf(directory):
        return  # checked by `locate`
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        missing = sorted(_list_indexed_files(index) - {f.name for f in directory.iterdir()})
        if missing:
            raise ModelError(
                f"{directory} is missing {len(missing):,} of the weight files listed in its index, "
                f"such as {missing[0]}; finish the download"
            )
        return
    if any(directory.glob("*.safetensors")):
        return
    unsafe = sorted(f.name for pattern in _UNSAFE_WEIGHTS for f in directory.glob(pattern))
    if unsafe:
        raise ModelError(
            f"{directory} has weights only as {unsafe[0]}, which can run code when loaded; convert "
            "them to safetensors with save_pretrained"
        )
    gguf = sorted(directory.glob("*.gguf"))
    if gguf:
        raise ModelError(f"{directory} has weights only as GGUF; pass the file: {gguf[0]}")
    raise ModelError(f"{directory} has no *.safetensors weights; finish the download")


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files that transformers loads, or the GGUF file.

    Call `check_weights` first.
    """
    if is_gguf(directory):
        return [directory]
    index, single_file = (directory / f"model.safetensors{end}" for end in (".index.json", ""))
    if single_file.is_file():
        return [single_file]
    if index.is_file():
        return [directory / name for name in sorted(_list_indexed_files(index))]
    return sorted(directory.glob("*.safetensors"))


def _list_indexed_files(index: Path) -> set[str]:
    """Return the names of the files that a weight index lists.

    Raises:
        ModelError: the index lists no file, or one outside of its folder.
    """
    named = read_object(index).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(f, str) for f in named.values()):
        raise ModelError(
            f"{index} has no valid weight_map of tensor names to file names; finish the "
            "download, or save the model again"
        )
    try:
        return {path_component(name, f"a file of {index}") for name in named.values()}
    except InputError as error:
        raise ModelError(str(error)) from None


def check_trust(
    settings: dict[str, Any], file: str, revision: str | None, *, local: bool, trust: bool
) -> None:
    """Check that a configuration asks only for code that the caller agreed to run.

    The checkpoint's own code runs only if `trust` is set. Code from the hub also needs a pinned
    commit, so that the reviewed code is the code that runs. Code of another repository never runs.

    Args:
        settings: The content of the configuration file.
        file: The name of the file, for messages.
        revision: The revision of a model on the hub.
        local: Whether the checkpoint is a local directory, which needs no pinned commit.
        trust: Whether the caller agreed to run the checkpoint's own code.

    Raises:
        ModelError: the file names code that the caller did not agree to run.
        InputError: `trust` is set for a hub model without a pinned commit.
    """
    for key, value in _walk(settings):
        kernel = "attn_implementation" in key or "experts_implementation" in key or "kernel" in key
        if kernel and isinstance(value, str) and "/" in value:
            raise ModelError(
                f"{file} refers to code in another repository ({key} = {value!r}), which is not "
                "supported; remove the field from a local copy of the model"
            )
    auto_map = settings.get("auto_map")
    if not auto_map:
        return
    if not trust:
        raise ModelError(
            f"{file} requires custom code (auto_map); review the code and pass "
            f"{arg('trust_remote_code', True)}, or remove auto_map from a local copy to use "
            "transformers' code"
        )
    if "--" in json.dumps(auto_map):
        raise ModelError(
            f"auto_map in {file} refers to code in another repository, which is not supported; "
            "remove auto_map from a local copy"
        )
    if not local and not _COMMIT.fullmatch(revision or ""):
        raise InputError(
            f"{arg('trust_remote_code')} requires a pinned revision (a 40-digit commit hash), "
            f"got {revision!r}"
        )


def _walk(value: Any, key: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield each (path of keys, leaf value) of nested settings."""
    if depth > 50:
        raise ModelError("the model's configuration is nested too deeply; download it again")
    if isinstance(value, dict):
        for k, v in value.items():
            yield from _walk(v, f"{key}.{k}".lstrip("."), depth + 1)
    elif isinstance(value, list):
        for v in value:
            yield from _walk(v, key, depth + 1)
    else:
        yield key, value


def list_model_files(directory: Path) -> list[Path]:
    """Return the files that decide what a model computes: weights, settings, tokenizer and code.

    Args:
        directory: The directory or GGUF file of a checkpoint, or the directory of an adapter. Call
            `check_weights` for a checkpoint first.
    """
    if is_gguf(directory):
        return [directory]
    names = (*_SETTINGS, *_PROCESSORS, *TOKENIZER_FILES, *TOKENIZER_SETTINGS)
    settings = [directory / name for name in names if (directory / name).is_file()]
    return sorted({*settings, *weight_files(directory), *directory.glob("*.py")})


def fingerprint(directory: Path, adapter: Path | None = None) -> str:
    """Return 32 hex digits that change when the weights, the config or the tokenizer change.

    Settings and tokenizer files count in full (JSON by its content, not its layout). Of each
    safetensors or GGUF file these count: the name (of safetensors only), the size, the header
    (names, dtypes, shapes, offsets) and 64 evenly spread blocks of 4 KiB. So hashing takes
    milliseconds for a checkpoint of any size. Two checkpoints that differ only between those blocks
    look the same, but training changes weights everywhere. The name of the directory does not
    count.

    Args:
        directory: The directory or GGUF file of the checkpoint.
        adapter: The directory of an adapter that is merged; its settings and weights count too.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in (*_SETTINGS, *TOKENIZER_FILES, *TOKENIZER_SETTINGS):
        file = directory / name
        if file.is_file():
            data = read_bytes(file)
            if name.endswith(".json"):
                data = json.dumps(read_object(file), sort_keys=True).encode()
            _add(digest, name.encode(), data)
    if is_gguf(directory):
        _add_weights(digest, directory, read_header(directory).data_start, b"gguf")
    for file in sorted(directory.glob("*.safetensors")):
        with open(open_regular(file), "rb") as stream:
            header = 8 + int.from_bytes(stream.read(8), "little")
        if header > _MAX_HEADER:
            raise ModelError(
                f"{file} declares a header of {header:,} bytes, but a safetensors header has at "
                f"most {_MAX_HEADER:,}; download the file again"
            )
        _add_weights(digest, file, header, file.name.encode())
    if adapter is not None:
        _add(digest, b"adapter", fingerprint(adapter).encode())
    return digest.hexdigest()


def _add_weights(digest: "hashlib.blake2b", file: Path, header: int, name: bytes) -> None:
    """Hash a file's name, its size, its header, and blocks spread over it."""
    size = file.stat().st_size
    with open(open_regular(file), "rb") as stream:
        _add(digest, name, str(size).encode(), stream.read(min(header, size)))
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1))
            _add(digest, stream.read(_SAMPLE_BYTES))


def _add(digest: "hashlib.blake2b", *parts: bytes) -> None:
    """Hash each part with its length, so that bytes cannot move from one part to the next."""
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
