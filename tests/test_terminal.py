"""Untrusted text cannot steer the terminal."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treegen.common.formatting import safe_text

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("18 apples,\n\ttwo left", "18 apples,\n\ttwo left"),
        ("\x1b[2J\x1b]0;owned\x07", "\\x1b[2J\\x1b]0;owned\\x07"),
        ("right\rwrong\x08\x00", "right\\x0dwrong\\x08\\x00"),
        ("\x7f\x80\x9b31m\x9f\xa0", "\\x7f\\x80\\x9b31m\\x9f\xa0"),
        ("a\u202eb\u2066c", "a\\u202eb\\u2066c"),
        ("one\u2028two\u2029three\x85", "one\\u2028two\\u2029three\\x85"),
        ("\ud800 and \udfff", "\\ud800 and \\udfff"),
        ("[bold]5[/bold] \\x1b", "[bold]5[/bold] \\x1b"),
        ("\u4f60\u597d \U0001f600 caf\u00e9", "\u4f60\u597d \U0001f600 caf\u00e9"),
    ],
)
def test_what_is_shown(text: str, shown: str) -> None:
    assert safe_text(text) == shown


def test_every_character_that_unicode_calls_a_control_is_written_out() -> None:
    for code in range(0x110000):
        char = chr(code)
        unsafe = unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") or char in BIDI
        assert (safe_text(char) != char) == (unsafe and char not in "\n\t"), hex(code)


@given(st.text(alphabet=st.characters(codec=None, exclude_categories=())))
def test_the_result_is_safe_and_stays_as_it_is(text: str) -> None:
    shown = safe_text(text)
    shown.encode()
    assert safe_text(shown) == shown
    assert shown.count("\n") == text.count("\n")
    assert all(
        c in "\n\t" or unicodedata.category(c) not in ("Cc", "Cs", "Zl", "Zp") for c in shown
    )
