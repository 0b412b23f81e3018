"""How an LLM is loaded and how it computes: each option, its default and its check. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from treegen.common.checks import device_name
from treegen.common.formatting import parse_bytes
from treegen.common.params import check_bool, check_int
from treegen.common.spelling import hint_at
from treegen.errors import InputError
from treegen.prompts.plan.cost import Sharing, check_sharing

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
"""The options that matter to loading alone."""
QUANTIZATIONS: Final = ("fp8", "mxfp4", "none")
KV_CACHE_DTYPES: Final = ("auto", "fp8")
SPECULATIONS: Final = ("off", "ngram")
DRAFT_TOKENS: Final = 12
"""Tokens that are guessed of a sample in a pass at most, if nothing else is said."""


class Sizes(NamedTuple):
    """The sizes that an engine works in.

    page_size: tokens of a cache page.
    max_rows: samples decoded at once at most.
    prefill_chunk: prompt tokens computed in one pass at most.
    """

    page_size: int
    max_rows: int
    prefill_chunk: int


_SIZES: Final = {"cpu": Sizes(16, 256, 2048), "cuda": Sizes(64, 4096, 8192)}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """A model, by directory or hub name, and how it computes; `LLM` tells what each option means.

    `treegen.model.machine.check_machine` checks what depends on the machine. Loading checks what
    depends on the model.

    Raises:
        InputError: an option has a value that is right on no machine.
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

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", device_name(self.device))
        check_sharing(self.sharing)
        if not callable(self.speculate) and self.speculate not in (None, *SPECULATIONS):
            raise InputError(
                f"speculate must be {' or '.join(SPECULATIONS)}, or a function; got "
                f"{self.speculate!r}"
            )
        check_int("tensor_parallel_size", self.tensor_parallel_size, least=1)
        if self.tensor_parallel_size > 2 and self.reproducible:
            # What two add up is the same in either order.
            raise InputError(
                "reproducible is for one GPU or two: in which order more ranks add up depends on "
                "the rows; set tensor_parallel_size (--tp) to 2, or leave reproducible out"
            )
        if self.draft_model is not None and self.speculate is not None:
            raise InputError(
                "speculate and draft_model both guess tokens; leave out one of the two"
            )
        if self.draft_tokens is not None:
            check_int("draft_tokens", self.draft_tokens, least=1)
            if not self.speculates:
                raise InputError(
                    "draft_tokens is of no use, because nothing guesses tokens; give speculate or "
                    "draft_model too"
                )
        if self.adapter is not None and self.tensor_parallel_size > 1:
            raise InputError(
                "adapter does not go with tensor_parallel_size yet; merge it into the model first, "
                "with peft"
            )
        if self.draft_model is not None and self.tensor_parallel_size > 1:
            raise InputError(
                "draft_model does not go with tensor_parallel_size yet; use speculate='ngram'"
            )
        check_stored(self.quantization, self.kv_cache_dtype)
        if self.quantization not in (None, "none") and self.tensor_parallel_size > 1:
            raise InputError(
                "quantization does not go with tensor_parallel_size yet; leave out one of the two"
            )
        if self.images:
            self._check_with_images()
        for name in Sizes._fields:
            if (value := getattr(self, name)) is not None:
                check_int(name, value, least=1)
        for name in (
            "eager",
            "compile",
            "run_ahead",
            "reproducible",
            "check",
            "trust_remote_code",
            "images",
        ):
            if (flag := getattr(self, name)) is not None:
                check_bool(name, flag)
        if self.memory is not None:
            parse_bytes(self.memory)

    def _check_with_images(self) -> None:
        others = {
            "draft_model": self.draft_model is not None,
            "reproducible": self.reproducible,
            "quantization": self.quantization == "fp8",
        }
        for name, is_given in others.items():
            if is_given:
                raise InputError(f"images does not go with {name} yet; leave out one of the two")

    @property
    def speculates(self) -> bool:
        """Whether tokens are guessed."""
        return self.draft_model is not None or self.speculate not in (None, "off")

    @property
    def cache_bytes(self) -> int | None:
        """Bytes of the key-value cache; None where the device decides."""
        return None if self.memory is None else parse_bytes(self.memory)

    def loading(self) -> dict[str, Any]:
        """The options that loading the model takes."""
        options = {name: getattr(self, name) for name in LOADING}
        if self.tensor_parallel_size > 1:
            options["quantization"] = "none"  # products in FP8 are for one GPU yet
        return options

    def engine(self) -> dict[str, Any]:
        """The options that an LLM of a loaded model takes."""
        left_out = {"model", *LOADING}
        named = (field.name for field in fields(self))
        return {name: getattr(self, name) for name in named if name not in left_out}

    def sizes(self, device_type: str) -> Sizes:
        """Return the sizes on a kind of device, its defaults where none are given."""
        default = _SIZES["cpu" if device_type == "cpu" else "cuda"]
        return Sizes(*(getattr(self, name) or getattr(default, name) for name in Sizes._fields))


def check_stored(quantization: str | None, kv_cache_dtype: str) -> None:
    """Refuse types of stored numbers that there are not.

    Raises:
        InputError: there is none of that name.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise InputError(
            f"quantization must be {' or '.join(QUANTIZATIONS)}, got {quantization!r:.60}"
        )
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise InputError(
            f"kv_cache_dtype must be {' or '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r:.60}"
        )


def check_known(given: Iterable[str], whose: str, own: Sequence[str] = ()) -> None:
    """Raise InputError for names that are no options of an LLM beside its model.

    Args:
        whose: What messages call them.
        own: Further names that are known there.
    """
    known = [*own, *(field.name for field in fields(EngineOptions) if field.name != "model")]
    if unknown := sorted(set(given) - set(known)):
        hint = hint_at(unknown[0], known) or f"; it knows {', '.join(known)}"
        raise InputError(f"{whose} have {', '.join(unknown)}, which treegen does not know{hint}")
