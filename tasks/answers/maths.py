r"""Mathematical answers: 0.5, 1/2 and \frac12 are one answer.

The package math-verify parses and compares them in a separate process with a time limit, because
the model's text is untrusted and may contain 10^10^10.
"""

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Final, TypeVar

from treegen.common.bounded.worker import FileWorker
from treegen.errors import InputError, install
from treegen.evals.verdict import Verdict, group_equal_answers
from treegen.tasks.answers.canonical import MAX_ANSWER, MAX_TEXT

# CPU seconds for parsing a text and comparing it, or for comparing two answers.
SECONDS: Final = 0.5
# After so many comparisons that took too long, an answer is not compared any more.
STRIKES: Final = 4
_MEMORY: Final = 2 << 30
_MAX_CACHED: Final = 100_000
_K = TypeVar("_K")
_V = TypeVar("_V")
_FILE: Final = Path(__file__).with_name("maths_worker.py")
# All instances of MathAnswer share one process.
_WORKER: Final = FileWorker(
    _FILE, MAX_ANSWER, seconds=SECONDS, memory=_MEMORY, what="that compares answers", site=True
)


class MathAnswer:
    r"""The expression that math-verify finds in a text: boxed, stated as the answer, or last.

    An answer is the text of an expression, such as `\frac{1}{2}`. There is no answer if math-verify
    finds none, needs more than SECONDS, or finds one with more than MAX_ANSWER characters.
    """

    compares_formulas: Final = True

    def __init__(self) -> None:
        """Start with empty caches."""
        self._verdicts: dict[bytes, Verdict] = {}
        self._same: dict[tuple[str, str], bool | None] = {}

    def ready(self) -> None:
        """Raise InputError if math-verify is not installed."""
        if find_spec("math_verify") is None:
            raise InputError(
                "comparing mathematical answers needs the package math-verify; install it with: "
                f"{install('math')}"
            )

    def canonical(self, reference: str) -> str | None:
        """Return a right answer in the form used for comparing; None if it is blank."""
        return without_dollars(reference) or None

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return the answer that a text gives, and whether it equals one of the references.

        Args:
            text: A model's text, of which the last MAX_TEXT characters are read.
            references: Right answers, as LaTeX. Dollar signs around one are ignored.

        Raises:
            InputError: The package math-verify is not installed.
        """
        text = text[-MAX_TEXT:]
        key = hashlib.blake2b("\0".join([*references, text]).encode("utf-8", "surrogatepass"))
        verdict = self._verdicts.get(key.digest())
        if verdict is None:
            self.ready()
            expected = [without_dollars(reference) for reference in references]
            reply = _WORKER.ask(["judge", text, expected])
            verdict = Verdict(*reply) if reply else Verdict(None, False)
            _keep(self._verdicts, key.digest(), verdict)
        return verdict

    def same(self, first: str, second: str) -> bool:
        """Return whether two answers are equal; False if the comparison takes too long."""
        return first == second or bool(self._compare(first, second))

    def representatives(self, answers: Collection[str]) -> Mapping[str, str]:
        """Return, for each answer, the representative of the class of answers equal to it."""
        slow: dict[str, set[str]] = {answer: set() for answer in answers}

        def same(first: str, second: str) -> bool:
            if max(len(slow[first]), len(slow[second])) >= STRIKES:
                return False
            reply = self._compare(first, second)
            if reply is None:
                slow[first].add(second)
                slow[second].add(first)
            return bool(reply)

        return group_equal_answers(answers, same)

    def _compare(self, first: str, second: str) -> bool | None:
        """Return whether two answers are equal; None if the comparison takes too long."""
        key = (first, second) if first < second else (second, first)
        if key not in self._same:
            self.ready()
            _keep(self._same, key, _WORKER.ask(["same", *key]))
        return self._same[key]


def _keep(cache: dict[_K, _V], key: _K, value: _V) -> None:
    """Cache a result; empty the cache first if it is full."""
    if len(cache) >= _MAX_CACHED:
        cache.clear()
    cache[key] = value


_PAIRS: Final = (("$", "$"), ("\\(", "\\)"), ("\\[", "\\]"))
_DOLLAR: Final = re.compile(r"(?<!\\)\$")


def without_dollars(answer: str) -> str:
    r"""Return an answer without delimiters around all of it: $...$, $$...$$, \(...\) or \[...\].

    "\$5" keeps its currency sign, and "$1$ and $2$" keeps all of its delimiters.
    """
    answer = answer.strip()
    for opening, closing in (*_PAIRS, _PAIRS[0]):
        inner = answer[len(opening) : -len(closing)].strip()
        if answer.startswith(opening) and answer.endswith(closing) and inner.strip("$"):
            within = inner[1:-1] if inner[0] == inner[-1] == "$" else inner
            if not inner.endswith("\\") and not (opening == "$" and _DOLLAR.search(within)):
                answer = inner
    if len(_DOLLAR.findall(answer)) == 1:  # the other one of the pair is missing
        answer = answer.removeprefix("$")
        answer = answer if answer.endswith("\\$") else answer.removesuffix("$")
    return answer
