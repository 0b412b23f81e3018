"""Checks of the language with the package langdetect, which the published code uses.

langdetect draws at random. Here it uses a fixed seed, so that a score is always the same.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from treegen.tasks.ifeval.checks import Check, text

# langdetect reads 10,000 characters, after it has removed addresses.
_READ: Final = 100_000


def is_installed() -> bool:
    """Return whether the package is installed."""
    return find_spec("langdetect") is not None


def language_of(answer: str) -> str | None:
    """Return the code of a text's language, such as "en"; None if it has no usable letters."""
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(answer[:_READ])
    try:
        language: str = detector.detect()
    except LangDetectException:
        return None
    return language


def response_language(given: Mapping[str, Any]) -> Check:
    """Require a language. A text without letters passes, as published."""
    wanted = text(given, "language")
    return lambda answer: language_of(answer) in (wanted, None)


def english_capital(given: Mapping[str, Any]) -> Check:
    """Require English in capital letters only."""
    return lambda answer: answer.isupper() and language_of(answer) in ("en", None)


def english_lowercase(given: Mapping[str, Any]) -> Check:
    """Require English in lower case only."""
    return lambda answer: answer.islower() and language_of(answer) in ("en", None)


@cache
def _factory() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory
