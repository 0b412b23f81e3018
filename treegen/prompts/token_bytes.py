"""The bytes of tokens, spelling of texts in tokens byte by byte, and lower bounds of lengths."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAX_CACHED_TEXTS: Final = 2**14  # spelled texts that are remembered


def token_bytes(tokenizer: Any) -> dict[int, bytes] | None:
    """Return the bytes of each token that is text, by token id.

    Added tokens that are not special, such as `<tool_call>` in Qwen2.5, are text like any other.
    Special tokens have no bytes.

    Args:
        tokenizer: A transformers tokenizer.

    Returns:
        The bytes by id, or None if the tokenizer is slow or does not decode byte by byte.
    """
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    backend: Any = getattr(tokenizer, "backend_tokenizer", None)
    decoders = list(component_parts(getattr(backend, "decoder", None)))
    types = {part.get("type") for part in decoders}
    if not types & {"ByteLevel", "ByteFallback"}:
        return None
    added = backend.get_added_tokens_decoder()
    names = {id: name for name, id in backend.get_vocab(with_added_tokens=True).items()}
    if "ByteFallback" in types:
        spaces = [
            part["pattern"]["String"]
            for part in decoders
            if part["type"] == "Replace" and part["content"] == " " and "String" in part["pattern"]
        ]
        plain = {id: _fallback_bytes(name, spaces) for id, name in names.items() if id not in added}
    else:
        alphabet = {letter: byte for byte, letter in bytes_to_unicode().items()}
        spelled = ((id, _level_bytes(name, alphabet)) for id, name in names.items())
        plain = {id: text for id, text in spelled if text is not None and id not in added}
    special = set(getattr(tokenizer, "all_special_ids", ()))
    return plain | {
        id: token.content.encode()
        for id, token in added.items()
        if not token.special and id not in special
    }


class ByteSpeller:
    """The tokens of a tokenizer in the form that llguidance's LLTokenizer takes.

    llguidance can read a tokenizer.json itself. But it then treats every added token that looks
    like `<name>` as special: no text of a grammar may contain it, yet forced text is spelled with
    it.

    Attributes:
        tokens: The bytes of each token, by id; the name of a token that is not text.
        special_token_ids: The tokens that are not text.
        names: Ids of added tokens that are text, by their content.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, eos_ids: Iterable[int], num_tokens: int) -> None:
        """Read a tokenizer.

        Args:
            tokenizer: A fast transformers tokenizer.
            eos_ids: The tokens that end a sample, so no text contains them.
            num_tokens: Number of token ids of the model; the tokenizer may know fewer.

        Raises:
            ValueError: the tokenizer does not decode byte by byte.
        """
        spellings = token_bytes(tokenizer)
        if spellings is None:
            raise ValueError("its decoder does not work byte by byte")
        ends = list(eos_ids)
        self._bytes = {id: text for id, text in spellings.items() if text and id not in ends}
        self.eos_token_id = ends[0]
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self.names = {token.content: id for id, token in added.items() if id in self._bytes}
        self.special_token_ids = [id for id in range(num_tokens) if id not in self._bytes]
        added_bytes = {id: token.content.encode() for id, token in added.items()}
        self.tokens = [
            self._bytes.get(id) or added_bytes.get(id) or b"<[%d]>" % id for id in range(num_tokens)
        ]
        self._backend = _plain(backend)
        self.spell = functools.lru_cache(maxsize=_MAX_CACHED_TEXTS)(self._spell)

    def __call__(self, text: str | bytes) -> list[int]:
        """Return the token ids of a text as the tokenizer encodes it inside another text."""
        return self.spell(text if isinstance(text, str) else text.decode())

    def _spell(self, text: str) -> list[int]:
        if (ids := self._encode_exactly(text)) is not None:
            return ids
        # The tokenizer changes the text (NFC, for example), or the text has a special token.
        parts = self._names.split(text) if self.names else [text]
        encoded = (self._encode_exactly(part) for part in parts)
        return [
            id
            for part, ids in zip(parts, encoded, strict=True)
            for id in (self._longest_first(part.encode()) if ids is None else ids)
        ]

    def _encode_exactly(self, text: str) -> list[int] | None:
        """Return the tokenizer's ids of a text; None if they decode to another text."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        is_same = b"".join(self._bytes.get(id, b"\xff") for id in ids) == text.encode()
        return ids if is_same else None

    def _longest_first(self, text: bytes) -> list[int]:
        """Return tokens whose bytes join to the text: at each position the longest token."""
        ids, start = list[int](), 0
        while start < len(text):
            ends = range(min(start + self._longest, len(text)), start, -1)
            end = next((end for end in ends if text[start:end] in self._ids), None)
            if end is None:
                raise ValueError(f"no token has the byte {text[start]:#04x}")
            ids.append(self._ids[text[start:end]])
            start = end
        return ids

    @functools.cached_property
    def _names(self) -> re.Pattern[str]:
        longest = sorted(self.names, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest))})")

    @functools.cached_property
    def _ids(self) -> Mapping[bytes, int]:
        return {text: id for id, text in sorted(self._bytes.items())}

    @functools.cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids), default=0)


def _plain(backend: Any) -> Any:
    """Return a tokenizer that adds no space before a text and reads special tokens as text."""
    state = json.loads(backend.to_str())
    state |= {"padding": None, "truncation": None, "post_processor": None}
    state["normalizer"] = _without_prefix(state["normalizer"])
    state["pre_tokenizer"] = _without_prefix(state["pre_tokenizer"])
    plain = type(backend).from_str(json.dumps(state))
    plain.encode_special_tokens = True
    return plain


def _without_prefix(part: Any) -> Any:
    """Return a normalizer or a pre-tokenizer, as JSON, that adds nothing before a text."""
    if part is None or part["type"] == "Prepend":
        return None
    for name in ("normalizers", "pretokenizers"):
        if name in part:
            steps = [_without_prefix(step) for step in part[name]]
            return {**part, name: [step for step in steps if step is not None]}
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    return {**part, "add_prefix_space": False} if part["type"] == "ByteLevel" else part


def component_parts(component: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a tokenizer's component, such as its decoder; sequences are flattened."""
    if component is None:
        return
    try:
        pending = [json.loads(component.__getstate__())]
    except Exception:  # the component may be Python code, which may raise anything
        pending = [{"type": "Python"}]
    while pending:
        part = pending.pop(0)
        if part["type"] == "Sequence":
            names = ("normalizers", "pretokenizers", "decoders")
            pending = [*next(part[name] for name in names if name in part), *pending]
        else:
            yield part


def _fallback_bytes(name: str, spaces: Iterable[str]) -> bytes:
    """Return the bytes of a token from its SentencePiece name."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    for space in spaces:
        name = name.replace(space, " ")
    return name.encode()


def _level_bytes(name: str, alphabet: Mapping[str, int]) -> bytes | None:
    """Return the bytes of a token from its byte-level BPE name; None if the name is not one."""
    try:
        return bytes([alphabet[letter] for letter in name])
    except KeyError:
        return None


# Pre-tokenizers that cut a text and drop none of it. Split is one unless its behaviour is removal.
_CUTTING: Final = ("ByteLevel", "Digits", "Metaspace", "Punctuation", "Split")
# NFC composes at most 4 characters into one, because no character decomposes into more and
# decomposing makes no text shorter.
_COMPOSED: Final = 4


class TokenLowerBound:
    """Lower bounds of the number of tokens of texts, for the current state of one tokenizer.

    A tokenizer encodes about a megabyte per second, and no signal interrupts it. So a text of many
    megabytes, far too long for a model, is rejected by its length without encoding it. The bound is
    proved for byte pair encoding that loses no character, where a token covers at most as many
    characters as its own text has; for other tokenizers the bound is 0.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._max_token_chars = 0  # characters that a token covers at most; 0 if not known
        self._absorbing: list[str] = []  # added tokens that absorb all spaces next to them
        if getattr(tokenizer, "is_fast", False):
            self._inspect_backend(tokenizer.backend_tokenizer)

    def of_chars(self, num_chars: int) -> int:
        """Return a lower bound for texts of `num_chars` characters; 0 means that nothing is known.

        It holds for texts without added tokens that absorb the spaces next to them.
        """
        return -(-num_chars // self._max_token_chars) if self._max_token_chars else 0

    def of_text(self, text: str) -> int:
        """Return a lower bound for a text without special tokens around it; 0 means unknown."""
        return 0 if any(token in text for token in self._absorbing) else self.of_chars(len(text))

    def _inspect_backend(self, backend: Any) -> None:
        normalizers = list(component_parts(backend.normalizer))
        cutters = list(component_parts(backend.pre_tokenizer))
        vocab = backend.get_vocab(with_added_tokens=True)
        shrinks = _bound_shrinkage(normalizers)
        if (
            type(backend.model).__name__ != "BPE"
            or shrinks is None
            or any(c["type"] not in _CUTTING or c.get("behavior") == "Removed" for c in cutters)
            or not _has_all_bytes(backend.model, cutters, vocab)
        ):
            return
        absorbing = [
            token
            for token in backend.get_added_tokens_decoder().values()
            if token.lstrip or token.rstrip
        ]
        if normalizers and any(token.normalized for token in absorbing):
            return  # such a token also replaces other texts
        self._absorbing = [token.content for token in absorbing]
        self._max_token_chars = shrinks * max(map(len, vocab), default=0)


def _bound_shrinkage(normalizers: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the largest factor by which normalizers shorten a text; None if it is not known."""
    times = 1
    for part in normalizers:
        if part["type"] == "NFC":
            times *= _COMPOSED
        elif part["type"] == "Replace":
            replaced = part["pattern"].get("String")
            if replaced is None or len(part["content"]) < len(replaced):
                return None
        elif part["type"] != "Prepend":
            return None
    return times


def _has_all_bytes(
    model: Any, cutters: Sequence[Mapping[str, Any]], vocab: Mapping[str, int]
) -> bool:
    """Whether every byte of a text ends up in a token, whatever its characters are."""
    if any(part["type"] == "ByteLevel" for part in cutters):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(byte in vocab for byte in ByteLevel.alphabet())
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocab for byte in range(256))
