"""The one way by which text that others wrote (model output, data, ids) reaches a terminal."""

import re
from typing import Final

# C0 but tab and newline, DEL, C1, the characters of Unicode's Bidi_Control property, the line and
# paragraph separators (some terminals and pagers break lines there), and lone surrogates, which no
# UTF-8 stream can take.
_UNSAFE: Final = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def safe_text(text: str) -> str:
    r"""Return `text` with every character that could steer a terminal written out, as in \x1b.

    Newline and tab stay. The result encodes in UTF-8 and is unchanged by a second call. It may
    still hold rich markup: print it as `rich.text.Text`, or with `markup=False`. Backslashes are
    not doubled, so it is for reading and cannot be turned back.
    """
    return _UNSAFE.sub(_escape, text)
