"""Text of generated tokens, and the search for stop strings in it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from trained_tokenizers import BUILDERS, FRAGMENTS, SPACE, random_text, trained

from treegen.prompts.stops import StopStrings
from treegen.prompts.token_bytes import token_bytes
from treegen.prompts.token_text import PARTIAL, Detokenizer

GENERATED = st.lists(st.sampled_from(FRAGMENTS), max_size=10).map("".join)
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["\n", "\n\n", "Q:", " the", "fox j", ". ", "\u65e5\u672c", "```"]),
        st.sampled_from(FRAGMENTS),
        st.text(min_size=1, max_size=3),
    ),
    min_size=1,
    max_size=3,
)
LOSSLESS = ["gpt2", "llama3", "digits from the right", "llama2", "mistral", "gemma"]


def ids_of(text: str, name: str) -> list[int]:
    ids: list[int] = trained(name)(text, add_special_tokens=False)["input_ids"]
    return ids


def decoded(ids: list[int], name: str) -> str:
    text: str = trained(name).decode(ids, skip_special_tokens=True)
    return text


@pytest.mark.parametrize("name", LOSSLESS)
@settings(max_examples=80)
@given(
    prompt=st.builds(random_text, st.integers(0, 99), st.integers(0, 30)),
    added=GENERATED,
    cut=st.integers(0, 40),
)
def test_text_of_a_prompt_and_of_what_follows_make_the_whole(
    name: str, prompt: str, added: str, cut: int
) -> None:
    """Wherever the tokens are cut, between the bytes of a character as well."""
    # Written out, the sign for bytes that are no character cannot be told from such bytes.
    ids = ids_of((prompt + added).replace(PARTIAL, ""), name)
    cut = min(cut, len(ids))
    text = Detokenizer(trained(name)).text(ids[:cut], ids[cut:])
    whole = decoded(ids, name)
    before = whole.removesuffix(text)
    assert whole == before + text
    # What the prompt shows on its own, but for a character that it leaves unfinished.
    shown = Detokenizer(trained(name)).decode(ids[:cut]).rstrip(PARTIAL)
    assert before.rstrip(PARTIAL) == shown if cut < len(ids) else text == ""


def spelled(text: str, name: str) -> list[int]:
    """Token ids of a text in sentencepiece's alphabet, one a character."""
    ids: list[int] = trained(name).convert_tokens_to_ids(list(text.replace(" ", SPACE)))
    return ids


@pytest.mark.parametrize("name", ["llama2", "mistral", "gemma", "unigram"])
def test_the_leading_space_of_generated_text_is_kept(name: str) -> None:
    prompt, tokens = ids_of("the quick", name), spelled(" brown fox", name)
    detokenizer = Detokenizer(trained(name))
    assert detokenizer.text(prompt, tokens) == " brown fox"
    # Special tokens at the end of the prompt show nothing: the words before them count.
    stop = trained(name).convert_tokens_to_ids("</s>")
    assert detokenizer.text([*prompt, *[stop] * 40], tokens) == " brown fox"


@pytest.mark.parametrize("name", BUILDERS)
@given(st.lists(st.integers(0, 699), max_size=12), st.lists(st.integers(0, 699), max_size=6))
@example([3, 131, 0, 0], [0])  # in gemma's tokens, bytes of no character and <unk>
def test_tokens_without_text_do_not_lengthen_the_context(
    name: str, prompt: list[int], tokens: list[int]
) -> None:
    """A prompt may end with thousands of them, and every sample is decoded with its context."""
    tokenizer, detokenizer = trained(name), Detokenizer(trained(name))
    skipped = [len(tokenizer) + 9, *tokenizer.all_special_ids]
    ends_with_them = [*prompt, *(skipped * 200)[:200]]
    assert detokenizer.text(ends_with_them, tokens) == detokenizer.text(prompt, tokens)
    assert len(detokenizer._context(ends_with_them)) <= len(prompt)


def test_after_nothing_but_special_tokens_a_text_starts() -> None:
    tokens = ids_of("brown fox", "llama2")
    bos = trained("llama2").convert_tokens_to_ids("<s>")
    assert Detokenizer(trained("llama2")).text([bos], tokens) == "brown fox"
    assert Detokenizer(trained("llama2")).text([], tokens) == "brown fox"


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2"])
def test_characters_cut_by_the_end_of_the_prompt(name: str) -> None:
    detokenizer = Detokenizer(trained(name))
    first, second = (ids_of(f"a{character}", name) for character in "\U0001f9ff\U0001f9fe")
    assert first[0] == second[0] == ids_of("a", name)[-1]
    whole = [*first, *second[1:], *ids_of(" x", name)[-1:]]
    assert decoded(whole, name).startswith("a\U0001f9ff\U0001f9fe")
    for at in range(1, len(first)):
        assert detokenizer.text(whole[:at], whole[at:])[:2] == "\U0001f9ff\U0001f9fe"
    # Here the prompt shows one whole character in pieces, and the first pieces of another.
    for at in range(len(first), len(first) + len(second) - 1):
        assert detokenizer.text(whole[:at], whole[at:])[0] == "\U0001f9fe"


def test_an_unfinished_character_does_not_hide_those_before_it() -> None:
    """The decoder of Llama 2 shows bytes in a row as characters all or not at all."""
    ids = ids_of("a\U0001f9ff\U0001f9fe", "llama2")
    assert decoded(ids[:-1], "llama2").count(PARTIAL) == 7
    detokenizer = Detokenizer(trained("llama2"))
    assert detokenizer.text(ids_of("a", "llama2"), ids[-8:-1]) == "\U0001f9ff" + PARTIAL * 3
    # Neither before special tokens, which show nothing.
    stops = [trained("llama2").convert_tokens_to_ids("</s>")] * 2
    for end in (stops[:1], stops):
        added = detokenizer.text(ids_of("a", "llama2"), [*ids[-8:-1], *end])
        assert added == "\U0001f9ff" + PARTIAL * 3
    assert detokenizer.text([*ids[:-6], *stops], ids[-6:]) == "\U0001f9ff\U0001f9fe"


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=40)
@given(st.lists(st.lists(st.integers(0, 699), max_size=12), max_size=6))
def test_texts_are_the_same_made_together_or_apart(name: str, samples: list[list[int]]) -> None:
    detokenizer = Detokenizer(trained(name))
    prompt, characters = ids_of("a", name), ids_of("\U0001f9ff\U0001f9fe", name)
    samples += [characters[:stop] for stop in range(len(characters) + 1)]
    apart = [detokenizer.text(prompt, tokens) for tokens in samples]
    assert detokenizer.texts([prompt] * len(samples), samples) == apart


@pytest.mark.parametrize("name", ["gpt2", "llama3", "qwen"])
@given(st.lists(st.integers(0, 699), max_size=20))
def test_a_byte_level_decoder_shows_whole_characters_whatever_follows(
    name: str, tokens: list[int]
) -> None:
    whole = decoded(tokens, name)
    for stop in range(len(tokens)):
        shown = decoded(tokens[:stop], name)
        assert shown.endswith(PARTIAL) or whole.startswith(shown)


def test_bytes_that_never_become_a_character_do_not_take_from_the_prompt() -> None:
    name = "llama2"
    prompt = ids_of("a\U0001f9ff", name)
    stray = trained(name).convert_tokens_to_ids("<0xE6>")
    tokens = [stray, *ids_of("x", name)[-1:]]
    assert Detokenizer(trained(name)).text(prompt, tokens) == PARTIAL + "x"


@pytest.mark.parametrize("name", BUILDERS)
def test_ids_past_the_vocabulary_have_no_text(name: str) -> None:
    detokenizer = Detokenizer(trained(name))
    ids = ids_of("fox", name)
    assert detokenizer.text(ids, [len(trained(name)) + 9]) == ""
    stops = StopStrings(trained(name), ["x"], len(trained(name)) + 10)
    assert stops.may_end.shape == (len(trained(name)) + 10,)
    assert not stops.may_end[len(trained(name)) :].any()


def test_tokens_may_come_as_arrays() -> None:
    ids = np.array(ids_of("the quick brown fox", "llama2"), dtype=np.int32)
    assert Detokenizer(trained("llama2")).text(ids[:2], ids[2:]).endswith("fox")
    stops = StopStrings(trained("llama2"), ["fox"], len(trained("llama2")))
    assert stops.find_stop(ids[:1], ids[1:], num_new=1) is not None


@pytest.mark.parametrize("name", BUILDERS)
@settings(max_examples=30)
@given(
    prompt=GENERATED,
    added=st.one_of(GENERATED, st.lists(st.integers(0, 400), max_size=20)),
    stops=STOPS,
)
@example(prompt="x", added="a\nb", stops=["\n"])
def test_the_table_has_every_token_that_completes_a_stop_string(
    name: str, prompt: str, added: str | list[int], stops: list[str]
) -> None:
    """Rows that the table lets pass have no stop string that they did not have before."""
    tokenizer, detokenizer = trained(name), Detokenizer(trained(name))
    strings = StopStrings(tokenizer, stops, len(tokenizer))
    start = ids_of(prompt, name)
    tokens = ids_of(prompt + added, name)[len(start) :] if isinstance(added, str) else added
    for stop in range(1, len(tokens) + 1):
        if strings.find(detokenizer.text(start, tokens[:stop])) is not None:
            assert strings.may_end[tokens[stop - 1]]
            break


@pytest.mark.parametrize("name", ["llama3", "llama2", "gemma", "wordpiece"])
@settings(max_examples=30)
@given(
    prompt=GENERATED,
    tokens=st.lists(st.integers(0, 699), max_size=60),
    stops=STOPS,
    num_new=st.integers(1, 3),
)
def test_searching_the_tail_finds_what_searching_everything_finds(
    name: str, prompt: str, tokens: list[int], stops: list[str], num_new: int
) -> None:
    strings = StopStrings(trained(name), stops, 700)
    start = ids_of(prompt, name)
    for stop in range(num_new, len(tokens) + 1):
        found = strings.find_stop(start, tokens[:stop])
        assert strings.find_stop(start, tokens[:stop], num_new=num_new) == found
        if found is not None:
            break


@pytest.mark.parametrize("name", ["gpt2", "llama3", "llama2", "gemma"])
@pytest.mark.parametrize("row", [b"\x80", b"\xe4\xbd", "\U0001f600".encode()])
def test_a_stop_string_is_searched_for_in_the_last_bytes_of_a_long_row(
    name: str, row: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    bytes_of = token_bytes(trained(name)) or {}
    tokens_of = {data: token for token, data in bytes_of.items() if len(data) == 1}
    ids = [tokens_of[bytes([byte])] for byte in row * 1200][:1200]
    strings = StopStrings(trained(name), ["\u65e5\u672c", "fox"], len(trained(name)))
    rest = [*ids_of(" x", name), *(tokens_of[bytes([byte])] for byte in "\u65e5\u672c".encode())]
    assert strings.find_stop([], [*ids, *rest], num_new=1) == strings.find_stop([], [*ids, *rest])
    assert strings.find_stop([], [*ids, *rest], num_new=1) is not None
    decode_each, num_decoded = Detokenizer.decode_each, 0

    def count(detokenizer: Detokenizer, sequences: Sequence[Sequence[int]]) -> list[str]:
        nonlocal num_decoded
        num_decoded += sum(map(len, sequences))
        return decode_each(detokenizer, sequences)

    monkeypatch.setattr(Detokenizer, "decode_each", count)
    for stop in range(1000, 1200):
        assert strings.find_stop([], ids[:stop], num_new=1) is None
    assert num_decoded < 200 * 1000


def test_the_table_is_small_for_plain_stops() -> None:
    """It is there to keep Python out of the decode loop."""
    tokenizer = trained("llama3")
    table = StopStrings(tokenizer, ["\n\nQ:"], len(tokenizer)).may_end
    assert 0 < table.sum() < 0.05 * len(tokenizer)


def test_a_long_stop_string_has_as_small_a_table_as_its_end() -> None:
    tokenizer = trained("llama3")
    size = len(tokenizer)
    table = StopStrings(tokenizer, ["fox the " * 50_000 + "quick"], size).may_end
    assert (table == StopStrings(tokenizer, ["fox the " * 50 + "quick"], size).may_end).all()
    assert table[ids_of("a quick", "llama3")[-1]]


def test_no_stop_strings_end_nothing() -> None:
    strings = StopStrings(trained("gpt2"), [], 700)
    assert not strings.may_end.any()
    assert strings.find("text") is None
    assert strings.find_stop([], ids_of("text", "gpt2")) is None


def test_a_decoder_that_shows_spaces_late_gets_no_table() -> None:
    """Nothing can be told from a token alone then: every token may end a sample."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {word: token for token, word in enumerate(["a</w>", "b</w>", "c", "d"])}
    backend = Tokenizer(models.WordLevel(words, unk_token="c"))
    backend.decoder = decoders.BPEDecoder(suffix="</w>")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.decode([0]) == "a"
    assert tokenizer.decode([0, 1]) == "a b"
    assert StopStrings(tokenizer, ["a "], 4).may_end.all()


def test_find_takes_the_earliest_then_the_first_given() -> None:
    strings = StopStrings(trained("gpt2"), ["bc", "b", "a"], 10)
    assert strings.find("xxbcd") == (2, "bc")
    assert strings.find("xbxbc") == (1, "b")
    assert strings.find("xabc") == (1, "a")
    assert strings.find("xyz") is None


def test_hit_cuts_the_text_and_looks_at_generated_text_only() -> None:
    name = "llama2"
    strings = StopStrings(trained(name), ["fox j"], len(trained(name)))
    prompt = ids_of("the fox jumps", name)
    tokens = spelled(" over the fox jumps", name)
    assert strings.find_stop(prompt, tokens) == (" over the ", "fox j")
    assert strings.find_stop(prompt, tokens[:-5], num_new=1) is None
    assert strings.find_stop(prompt, tokens[:-4], num_new=1) == (" over the ", "fox j")
    # One that begins in the prompt does not count.
    assert strings.find_stop(ids_of("the fox", name), spelled(" jumps", name)) is None
