"""Small tokenizers of the kinds that language models have, trained on the spot."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from typing import Any, Final

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers
from tokenizers import decoders as dec
from tokenizers import processors as post
from tokenizers import trainers as train
from transformers import PreTrainedTokenizerFast

SPACE: Final = "\u2581"  # how sentencepiece writes a space
LLAMA3: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DIGITS_FROM_THE_RIGHT: Final = (
    r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
)
SPECIAL: Final = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTES: Final = [f"<0x{byte:02X}>" for byte in range(256)]
ENGLISH: Final = "the quick brown fox jumps over a lazy dog question answer number of apples"
WORDS: Final = (
    *ENGLISH.split(),
    *("caf\u00e9", "na\u00efve", "Stra\u00dfe", "\u041c\u043e\u0441\u043a\u0432\u0430"),
    *("\u65e5\u672c\u8a9e", "\u4f60\u597d", "don't", "it's", "we're", "12", "345", "1000000"),
    *("3.14", "x=y+1;", "##", "(a)", "[b]", "'q'", "--", "..."),
)
FRAGMENTS: Final = (
    *WORDS,
    *(" ", "  ", "   ", "\n", "\n\n", "\t", " \n ", "\r\n", "        "),
    *("0", "12", "999", "1234567", "a", "A", "aa", "aaaaaaa", "s", "'", "'s", ".", "...", "-----"),
    *("<|im_", "start|>", "end|>", "<|im_end|>", "<s>", "</", "s>", "<mask>", " <mask> ", "<"),
    *("e\u0301", "\u0301", "\u0301\u0323", "\ufb01", "\u212b", "\u1100\u1161", "\u3000", "\u200d"),
    *("\U0001f600", "\U0001f468\u200d\U0001f469", "\u0e01\u0e33", "\u0660\u0661\u0662", "\u2028"),
    *("\u4f60\u597d\u4e16\u754c", SPACE, "\ufffd", "\u00a0", "\u0130", "\u03a3"),
)


def random_text(seed: int, fragments: int) -> str:
    """Text that is hard on tokenizers: words, runs of one thing, halves of special tokens."""
    draw = random.Random(seed)
    pieces: list[str] = []
    while len(pieces) < fragments:
        kind = draw.random()
        if kind < 0.6:
            pieces.append(draw.choice(WORDS) + draw.choice(["", " ", " ", " "]))
        elif kind < 0.97:
            pieces.append(draw.choice(FRAGMENTS))
        else:
            pieces.append(draw.choice(FRAGMENTS) * draw.randint(2, 40))
    return "".join(pieces)


def _corpus() -> list[str]:
    return [random_text(seed, 40) for seed in range(200)]


def _wrap(tokenizer: Tokenizer, **kwargs: Any) -> PreTrainedTokenizerFast:
    tokenizer.add_special_tokens(SPECIAL[3:])
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", **kwargs
    )


def _template(tokenizer: Tokenizer, single: str) -> Any:
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
    return post.TemplateProcessing(single=single, pair=f"{single} $B", special_tokens=special)


def _byte_level(
    pattern: str | None, *, normalizer: Any = None, bos: bool = True, **model: Any
) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(**model))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = dec.ByteLevel()
    trainer = train.BpeTrainer(
        vocab_size=700,
        special_tokens=SPECIAL[:3],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    processors = [post.ByteLevel(trim_offsets=True)]
    tokenizer.post_processor = post.Sequence(
        [*processors, _template(tokenizer, "<s> $A")] if bos else processors
    )
    return _wrap(tokenizer)


def _sentencepiece(normalizer: Any, pre_tokenizer: Any, strip: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    steps = [dec.Replace(SPACE, " "), dec.ByteFallback(), dec.Fuse()]
    tokenizer.decoder = dec.Sequence([*steps, dec.Strip(" ", 1, 0)] if strip else steps)
    trainer = train.BpeTrainer(
        vocab_size=700,
        special_tokens=[*SPECIAL[:3], *BYTES],
        limit_alphabet=60,  # the rest falls back to bytes
        max_token_length=12,
        show_progress=False,
    )
    # Trained on short pieces: without a pre-tokenizer a text is one word.
    words = [piece for text in _corpus() for piece in text.replace(" ", f" {SPACE}").split(SPACE)]
    tokenizer.train_from_iterator(words, trainer)
    # The trainer knows no other way to put the bytes into the vocabulary than as special tokens.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = state["added_tokens"][:3]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.post_processor = _template(tokenizer, "<s> $A")
    return _wrap(tokenizer)


def _unigram(*, split: bool) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=True)
    tokenizer.decoder = dec.Metaspace()
    trainer = train.UnigramTrainer(
        vocab_size=500, special_tokens=SPECIAL[:3], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    tokenizer.post_processor = _template(tokenizer, "$A </s>")
    return _wrap(tokenizer)


def _wordpiece() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = dec.WordPiece(cleanup=False)
    trainer = train.WordPieceTrainer(
        vocab_size=500, special_tokens=SPECIAL[:3], show_progress=False
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.post_processor = _template(tokenizer, "<s> $A </s>")
    return _wrap(tokenizer)


BUILDERS: Final[dict[str, Callable[[], PreTrainedTokenizerFast]]] = {
    "gpt2": lambda: _byte_level(None, bos=False),
    "llama3": lambda: _byte_level(LLAMA3, ignore_merges=True),
    "qwen": lambda: _byte_level(LLAMA3, normalizer=normalizers.NFC(), bos=False),
    "digits from the right": lambda: _byte_level(DIGITS_FROM_THE_RIGHT),
    "llama2": lambda: _sentencepiece(
        normalizers.Sequence([normalizers.Prepend(SPACE), normalizers.Replace(" ", SPACE)]),
        None,
        strip=True,
    ),
    "mistral": lambda: _sentencepiece(
        None, pre_tokenizers.Metaspace(prepend_scheme="first", split=False), strip=True
    ),
    "gemma": lambda: _sentencepiece(
        normalizers.Replace(" ", SPACE),
        pre_tokenizers.Split(" ", "merged_with_previous"),
        strip=False,
    ),
    "unigram": lambda: _unigram(split=True),
    "unigram of one word": lambda: _unigram(split=False),
    "wordpiece": _wordpiece,
}


@cache
def trained(name: str) -> PreTrainedTokenizerFast:
    """Return one of BUILDERS, trained once a session."""
    return BUILDERS[name]()
