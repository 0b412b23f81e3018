"""The options of an LLM: how it is loaded and how it computes. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from treegen.common.checks import check_bool, check_int, device_name
from treegen.common.foreign_names import ENGINE_ADVICE
from treegen.common.formatting import parse_bytes
from treegen.common.spelling import suggest_argument, suggest_arguments
from treegen.errors import InputError, arg
from treegen.prompts.plan.cost_model import Sharing, check_sharing

if TYPE_CHECKING:
    from treegen.common.drafter import DraftFunction

LOADING: Final = (
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "device",
    "check",
    "revision",
    "trust_remote_code",
    "tensor_parallel_size",
    "adapter",
    "images",
)
"""The options that only affect loading."""
QUANTIZATIONS: Final = ("fp8", "mxfp4", "nvfp4", "none")
KV_CACHE_DTYPES: Final = ("auto", "fp8")
SPECULATIONS: Final = ("off", "ngram")
DRAFT_TOKENS: Final = 12
"""Default maximum of draft tokens per sample and step."""


class Sizes(NamedTuple):
    """The sizes that an engine works with."""

    page_size: int
    """Tokens per cache page."""
    max_rows: int
    """Maximum samples decoded at once."""
    prefill_chunk: int
    """Maximum prompt tokens computed in one pass."""


_SIZES: Final = {"cpu": Sizes(16, 256, 2048), "cuda": Sizes(64, 4096, 8192)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """A model, by directory or hub name, and how it computes; `LLM` documents each option.

    `treegen.model.rank_processes.check_machine` checks what depends on the machine. Loading checks
    what depends on the model.

    Raises:
        InputError: an option has a value that is invalid on every machine.
    """

    model: str
    dtype: str = "auto"
    quantization: str | None = None
    kv_cache_dtype: str = "auto"
    device: str = "auto"
    memory: int | str | None = None
    page_size: int | None = None
    max_rows: int | None = None
    prefill_chunk: int | None = None
    sharing: Sharing = "auto"
    impl: str = "auto"
    eager: bool = False
    compile: bool | None = None
    run_ahead: bool | None = None
    reproducible: bool = False
    check: bool = True
    revision: str | None = None
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    speculate: str | DraftFunction | None = None
    draft_model: str | None = None
    draft_tokens: int | None = None
    adapter: str | None = None
    images: bool = False
    chat_template: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_name(self.device))
        check_sharing(self.sharing)
        check_int("tensor_parallel_size", self.tensor_parallel_size, minimum=1)
        self._check_drafting()
        check_stored(self.quantization, self.kv_cache_dtype)
        self._check_combinations()
        for name in Sizes._fields:
            if (value := getattr(self, name)) is not None:
                check_int(name, value, minimum=1)
        for field in fields(self):
            is_flag = field.type in ("bool", "bool | None")
            if is_flag and (flag := getattr(self, field.name)) is not None:
                check_bool(field.name, flag)
        if self.memory is not None:
            parse_bytes(self.memory)
        if self.chat_template is not None and not isinstance(self.chat_template, str):
            raise InputError(
                f"{arg('chat_template')} must be a template or the path of a file, got "
                f"{self.chat_template!r:.60}"
            )

    def _check_drafting(self) -> None:
        """Raise InputError for options of speculation that contradict each other."""
        if not callable(self.speculate) and self.speculate not in (None, *SPECULATIONS):
            raise InputError(
                f"{arg('speculate')} must be {' or '.join(SPECULATIONS)} or a function, got "
                f"{self.speculate!r}"
            )
        if self.draft_model is not None and self.speculate is not None:
            raise InputError(
                f"{arg('speculate')} and {arg('draft_model')} cannot be used together; remove one "
                "of the two"
            )
        if self.draft_tokens is not None:
            check_int("draft_tokens", self.draft_tokens, minimum=1)
            if not self.speculates:
                raise InputError(
                    f"{arg('draft_tokens')} requires {arg('speculate')} or "
                    f"{arg('draft_model')}; set one of the two"
                )

    def _check_combinations(self) -> None:
        """Raise InputError for options that cannot be used together."""
        is_parallel, ranks = self.tensor_parallel_size > 1, arg("tensor_parallel_size")
        has_adapter, has_draft = self.adapter is not None, self.draft_model is not None
        is_quantized = self.quantization not in (None, "none")
        by_peft, remove = "merge the adapter into the model with peft", "remove one of the two"
        by_ngrams = f"use {arg('speculate', 'ngram')}"
        combinations = (
            (is_parallel and has_adapter, "adapter", ranks, by_peft),
            (is_parallel and has_draft, arg("draft_model"), ranks, by_ngrams),
            (is_parallel and is_quantized, "quantization", ranks, remove),
            (self.images and has_draft, "images", "draft_model", remove),
            (self.images and self.reproducible, "images", "reproducible", remove),
            (self.images and self.quantization == "fp8", "images", "quantization", remove),
        )
        for is_set, option, other, advice in combinations:
            if is_set:
                raise InputError(f"{option} is not supported with {other}; {advice}")

    @property
    def speculates(self) -> bool:
        """Whether draft tokens are proposed."""
        return self.draft_model is not None or self.speculate not in (None, "off")

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the KV cache; None if they depend on the free memory of the device."""
        return None if self.memory is None else parse_bytes(self.memory)

    @property
    def source(self) -> dict[str, Any]:
        """Which revision of the model to read, and whether code of its own may run."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}

    def loading(self) -> dict[str, Any]:
        """Return the options for loading the model."""
        options = {name: getattr(self, name) for name in LOADING}
        if self.tensor_parallel_size > 1:
            options["quantization"] = "none"  # FP8 products are not yet supported on several GPUs
        return options

    def engine(self) -> dict[str, Any]:
        """Return the options for an LLM whose model is already loaded."""
        left_out = {"model", *LOADING}
        named = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in named if name not in left_out}

    def sizes(self, device_type: str) -> Sizes:
        """Return the sizes on a device type, "cpu" or "cuda". Options not given have defaults."""
        default = _SIZES["cpu" if device_type == "cpu" else "cuda"]
        return Sizes(*(getattr(self, name) or getattr(default, name) for name in Sizes._fields))


def check_stored(quantization: str | None, kv_cache_dtype: str) -> None:
    """Check the names of the types in which weights and the cache are stored.

    Raises:
        InputError: a name is unknown.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InputError(
            f"{arg('quantization')} must be {' or '.join(QUANTIZATIONS)}, got {quantization!r:.60}"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InputError(
            f"{arg('kv_cache_dtype')} must be {' or '.join(KV_CACHE_DTYPES)}, got "
            f"{kv_cache_dtype!r:.60}"
        )


def check_known(names: Iterable[str], whose: str, more_names: Sequence[str] = ()) -> None:
    """Raise InputError for names that are not options of an LLM.

    Args:
        names: The names to check. "model" is not an option here.
        whose: What error messages call the source of the names.
        more_names: Further names that are allowed.
    """
    allowed = [
        *more_names,
        *(field.name for field in fields(EngineOptions) if field.name != "model"),
    ]
    if unknown := sorted(set(names) - set(allowed)):
        hints = suggest_arguments(
            unknown,
            lambda name: suggest_argument(name, allowed, ENGINE_ADVICE),
            f"; use one of {', '.join(allowed)}",
        )
        raise InputError(f"{whose} have unknown names: {', '.join(unknown)}{hints}")
