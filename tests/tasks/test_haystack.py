"""Haystacks: filler, where needles go in it, and texts of a wanted length."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.errors import InputError
from treegen.tasks.needle.task import Measure, fit_length
from treegen.tasks.needle.text import COLOURS, Haystack, filler, insert, load_haystack

WORDS = st.lists(
    st.sampled_from(["a", "lake", "Mr.", "St.", "end.", "why?", "'no!'", "so,", "far;"]), min_size=1
).map(" ".join)


@given(WORDS, st.integers(0, 400))
def test_filler_is_whole_words_that_end_as_a_sentence(text: str, size: int) -> None:
    part = Haystack(text, "test").take(size)
    assert len(part) <= size
    if part:
        assert part.rstrip("'")[-1] in ".!?"
        given, wanted = part.split(), (text.split() * (size + 1))[: len(part.split())]
        assert given[:-1] == wanted[:-1]
        assert wanted[-1].startswith(given[-1].rstrip("."))


@given(WORDS, st.lists(st.floats(0, 1), max_size=5), st.integers(1, 30))
def test_needles_go_in_whole_and_in_order_and_leave_the_text_as_it_is(
    text: str, depths: list[float], reach: int
) -> None:
    needles = [(depth, f"<{index}.>") for index, depth in enumerate(sorted(depths))]
    document = insert(text, needles, reach=reach)
    for start, (_, needle) in zip(document.starts, needles, strict=True):
        assert document.text[start:].startswith(needle)
    left = [word for word in document.text.split() if not word.startswith("<")]
    assert left == text.split()
    assert list(document.starts) == sorted(document.starts)


def test_needles_stand_behind_sentences_not_behind_titles() -> None:
    text = "He saw Mr. Lowe. Then J. Hill of St. Ives left. No more?"
    for depth, want in [
        (0.0, "N. He saw Mr. Lowe. Then J. Hill of St. Ives left. No more?"),
        (0.2, "N. He saw Mr. Lowe. Then J. Hill of St. Ives left. No more?"),
        (0.3, "He saw Mr. Lowe. N. Then J. Hill of St. Ives left. No more?"),
        (0.8, "He saw Mr. Lowe. N. Then J. Hill of St. Ives left. No more?"),
        (0.85, "He saw Mr. Lowe. Then J. Hill of St. Ives left. N. No more?"),
        (1.0, "He saw Mr. Lowe. Then J. Hill of St. Ives left. No more? N."),
    ]:
        assert insert(text, [(depth, "N.")]).text == want
    assert insert("a b c d e f", [(0.5, "N.")], reach=2).text == "a b c N. d e f"
    assert insert("ab cdefgh", [(0.5, "N.")], reach=2).text == "ab N. cdefgh"
    assert insert("x" * 900, [(0.5, "N.")]).text == "N. " + "x" * 900
    assert insert("x" * 1800, [(0.5, "N.")]).text == f"{'x' * 900} N. {'x' * 900}"


def test_sentences_of_other_scripts_are_seen() -> None:
    text = "\u4eca\u5929\u3002\u660e\u5929\uff01\u597d\u3002"
    assert insert(text, [(0.5, "N.")]).text == f"{text[:3]} N. {text[3:]}"


@given(st.integers(1, 5000), st.integers(0, 60), st.integers(1, 9))
def test_fitted_text_is_close_to_its_length_and_not_above(
    length: int, needles: int, width: int
) -> None:
    """The measure counts groups of characters and a fixed part, as a tokenizer does."""
    haystack = Haystack(filler()[:3000], "test")
    measure = Measure("groups", lambda text: 2 + -(-len(text) // width), 1)

    def build(size: int) -> str:
        return "n" * needles + haystack.take(size)

    if measure.count(build(0)) > length:
        with pytest.raises(InputError, match=r"a text needs .* without any filler"):
            fit_length(build, measure, length, what="a text")
    else:
        for start in (0, 1, 700, 10**5):
            size = fit_length(build, measure, length, what="a text", start=start)
            used = measure.count(build(size))
            assert length - max(16, length // 1000) - 20 <= used <= length


def test_bundled_filler_is_the_same_everywhere_and_holds_no_answer() -> None:
    text = filler()
    assert text.startswith("The innkeeper exchanged a drawing of the weathercock for the promise")
    assert text.isascii() and "{" not in text and "  " not in text
    words = set(re.findall("[a-z]+", text.casefold()))
    assert not words & {"dog", "dogs", "magic", "francisco", *COLOURS}


def test_haystacks_are_files_and_folders_read_by_name(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfTwo.\r\n\r\nThree.")
    (tmp_path / "a.txt").write_text("  One\u00a0 .\n")
    (tmp_path / "c.md").write_text("not this")
    assert load_haystack(str(tmp_path)).text == "One . Two. Three."
    assert load_haystack(str(tmp_path / "b.txt")).text == "Two. Three."
