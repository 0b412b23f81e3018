"""Checks of the language, by the package langdetect, which the published code uses.

langdetect draws at random. Here it draws with a fixed seed, so that a score is always the same.
"""

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from treegen.tasks.ifeval.arguments import Check, text

# langdetect reads 10,000 characters, after it has taken addresses out.
_READ: Final = 100_000


def is_installed() -> bool:
    """Return whether the package is there."""
    return find_spec("langdetect") is not None


def language_of(answer: str) -> str | None:
    """Return the code of a text's language, such as "en"; None if it has no letters to tell by."""
    from langdetect.lang_detect_exception import LangDetectException

    detector = _factory().create()
    detector.append(answer[:_READ])
    try:
        found: str = detector.detect()
    except LangDetectException:
        return None
    return found


def response_language(given: Mapping[str, Any]) -> Check:
    """It is in a language. A text without letters follows, as published."""
    wanted = text(given, "language")
    return lambda answer: language_of(answer) in (wanted, None)


def english_capital(given: Mapping[str, Any]) -> Check:
    """It is in English, all in capital letters."""
    return lambda answer: answer.isupper() and language_of(answer) in ("en", None)


def english_lowercase(given: Mapping[str, Any]) -> Check:
    """It is in English, all in lower case."""
    return lambda answer: answer.islower() and language_of(answer) in ("en", None)


@cache
def _factory() -> Any:
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    factory = DetectorFactory()
    factory.load_profile(PROFILES_DIRECTORY)
    factory.set_seed(0)
    return factory
