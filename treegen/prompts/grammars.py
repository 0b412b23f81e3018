"""What a sample has to be: JSON of a schema, a text of a regular expression, grammar or choice.

llguidance compiles it for a tokenizer, and says after any tokens which ones may come next.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, TypeVar

from treegen.errors import InputError, install
from treegen.prompts.grammar_termination import has_finite_text, has_finite_value
from treegen.prompts.token_bytes import ByteSpeller

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Structure = tuple[str, str]
"""A kind, such as "json_schema", and what it says, as text."""


# What vLLM's server calls them, in a request and in its structured_outputs.
_NAMES: Final = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
_WITHIN: Final = {"json": "json_schema", "regex": "regex", "grammar": "grammar", "choice": "choice"}
# Tokens of which a grammar often allows all or none. Beside those that llguidance knows, which are
# for strings of JSON, these are for words in a regular expression: masks are made in half the time
# and less. What masks allow is the same.
_WORDS: Final = ("[a-z]{1,30}", "[a-zA-Z0-9_]{1,30}")
# What grammars consist of: strings, comments, patterns, and names of tokens.
_LARK: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s"]+>')
_MOST_SECONDS: Final = 30
_MOST_LANES: Final = 16
_SECONDS_OF_LANES: Final = 0.5  # the time that all lanes of a grammar may take to compile
_MOST_TOLD: Final = 200  # characters of what llguidance says
_Made = TypeVar("_Made")
JSON_SPACE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""How JSON is written: as by `json.dumps`, unless a schema has an `x-guidance` of its own.

Where any white space may stand, a model may write nothing else until its limit."""
REQUESTED: Final = ("response_format", "structured_outputs", *_NAMES)
"""How requests ask for a structure, in OpenAI's protocol and in vLLM's."""


def parse_structure(given: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of SamplingParams that parts of a request, by REQUESTED, stand for.

    Raises:
        InputError: one is not as it should be.
    """
    found = {ours: given[theirs] for theirs, ours in _NAMES.items() if theirs in given}
    if within := given.get("structured_outputs"):
        if not isinstance(within, Mapping):
            raise InputError(f"structured_outputs must be an object, got {within!r:.80}")
        asked = {name: value for name, value in within.items() if value not in (None, False)}
        if asked.pop("json_object", False):
            found["json_schema"] = {"type": "object"}
        if unknown := sorted(asked.keys() - _WITHIN.keys()):
            raise InputError(
                f"structured_outputs has {unknown[0]!r:.80}, which is not supported; "
                f"known: {', '.join(sorted(_WITHIN))}"
            )
        found |= {_WITHIN[name]: value for name, value in asked.items()}
    wanted = given.get("response_format") or {}
    kind = wanted.get("type", "text") if isinstance(wanted, Mapping) else None
    if kind == "json_object":
        found["json_schema"] = {"type": "object"}
    elif kind == "json_schema":
        described = wanted.get("json_schema")
        if not isinstance(described, Mapping) or "schema" not in described:
            raise InputError("response_format of type json_schema must have json_schema.schema")
        found["json_schema"] = described["schema"]
    elif kind != "text":
        raise InputError("response_format must have a type: text, json_object or json_schema")
    return found


class Grammar:
    """What a sample has to be, compiled for one tokenizer.

    num_words: words of 32 bits in a mask, which has a bit for each token.
    num_lanes: how many lanes `start` knows.
    """

    def __init__(
        self, structure: Structure, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Compile it. eos_ids: the tokens that end a sample. vocab_size: logits of a token.

        Raises:
            InputError: it cannot be read, no text can ever satisfy it, or llguidance is missing.
        """
        if find_spec("llguidance") is None:
            raise InputError(
                f"{structure[0]} needs llguidance; install it with: {install('structured')}"
            )
        kind, text = structure
        known, self._names = _tokens_of(tokenizer, len(tokenizer), tuple(eos_ids), vocab_size)
        self._known = known
        self.num_words = -(-known.vocab_size // 32)
        start = time.perf_counter()
        self._lanes = [_run_with_timeout(kind, lambda: self._first(kind, text))]
        self.num_lanes = _num_lanes(time.perf_counter() - start)
        if self._lanes[0].is_error():
            raise _make_grammar_error(kind, self._lanes[0].get_error())

    def start(self, lane: int = 0) -> LLMatcher:
        """A matcher of a text that begins.

        Args:
            lane: Matchers of one lane share what they learn about tokens, behind one lock. So those
                of one lane are asked one after another, and those of several lanes at once.
        """
        if (lack := lane + 1 - len(self._lanes)) > 0:
            with ThreadPoolExecutor() as threads:
                made = [threads.submit(self._new) for _ in range(lack)]
            self._lanes += [each.result() for each in made]
        return self._lanes[lane].deep_copy()

    def _first(self, kind: str, text: str) -> LLMatcher:
        self._compiled = _compile_structure(kind, text)
        if kind == "grammar":
            self._compiled = _named_by_id(self._compiled, self._names)
        return self._new()

    def _new(self) -> LLMatcher:
        from llguidance import LLMatcher

        return _warm_up(LLMatcher(self._known, self._compiled, log_level=0))


def grammar_of(
    structure: Structure | None, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int
) -> Grammar | None:
    """The compiled grammar of a structure, if there is one; raises as `Grammar` does."""
    return None if structure is None else Grammar(structure, tokenizer, eos_ids, vocab_size)


def _num_lanes(seconds: float) -> int:
    """How many lanes a grammar has that took so long to compile."""
    return min(max(int(_SECONDS_OF_LANES / max(seconds, 1e-9)), 1), _MOST_LANES)


def _warm_up(matcher: LLMatcher) -> LLMatcher:
    """Return the same matcher, whose copies know the first mask; it has failed if there is none."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _compile_structure(kind: str, text: str) -> str:
    """What llguidance takes for a structure."""
    from llguidance import LLMatcher, grammar_from

    match kind:
        case "json_schema":
            schema = json.loads(text)
            if not has_finite_value(schema):
                raise InputError(
                    "json_schema can never end: what it requires has no end; "
                    "leave a property that holds itself out of required"
                )
            if schema is True:  # any JSON
                schema = {}
            if isinstance(schema, dict):
                text = json.dumps({"x-guidance": JSON_SPACE, **schema})
            return str(LLMatcher.grammar_from_json_schema(text))
        case "regex":
            return str(LLMatcher.grammar_from_regex(text))
        case "choice":
            return str(grammar_from("choice", text))
    try:
        found = str(grammar_from("grammar", text))
    except (ValueError, RecursionError) as error:
        raise _make_grammar_error(kind, str(error)) from None
    if not has_finite_text(found):
        raise InputError(
            "grammar can never end: its rule start leads back to itself for ever; give it an end"
        )
    return found


def _named_by_id(lark: str, ids: Mapping[str, int]) -> str:
    """Return a grammar whose `<name>` of added tokens are ids, as of all that are not special."""
    return _LARK.sub(lambda found: f"<[{ids[found[0]]}]>" if found[0] in ids else found[0], lark)


def _make_grammar_error(kind: str, told: str) -> InputError:
    """The error for what llguidance does not take. told: what it says."""
    first = textwrap.shorten((told.strip().splitlines() or ["it is refused"])[0], _MOST_TOLD)
    if "coerce_one_of" in told:
        first = "the ways of a oneOf may overlap, which is not supported; write anyOf"
    return InputError(f"{kind} cannot be used: {first}; mend it")


def _run_with_timeout(kind: str, make: Callable[[], _Made]) -> _Made:
    """What a function makes, in a thread that is left alone if it takes too long.

    A few hundred characters can take for ever: what patterns have in common is found by trying.
    """
    made: list[_Made] = []
    failed: list[BaseException] = []

    def work() -> None:
        try:
            made.append(make())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work, name="treegen-grammar", daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
    if failed:
        raise failed[0]
    if not made:
        raise InputError(f"{kind} takes more than {_MOST_SECONDS} seconds to compile; simplify it")
    return made[0]


@functools.lru_cache(maxsize=4)
def _tokens_of(
    tokenizer: Any, size: int, eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[LLTokenizer, Mapping[str, int]]:
    """Return the tokens of a tokenizer, as llguidance needs them; takes a second for a large one.

    Args:
        tokenizer: A transformers tokenizer.
        size: Its length, a part of the key, because a tokenizer may get further tokens meanwhile.
        eos_ids: The tokens that end a sample.
        vocab_size: Logits of a token.

    Returns:
        The tokens, and the ids of added tokens that are text, by their content.

    Raises:
        InputError: the tokenizer is not of the fast kind, or knows no end of a text.
    """
    from llguidance import LLTokenizer

    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError("structured output needs a fast tokenizer (tokenizer.json)")
    ends = [each for each in eos_ids if each < vocab_size]
    if not ends:
        raise InputError("structured output needs a model with an end-of-sequence token")
    try:
        speller: Any = ByteSpeller(tokenizer, ends, max(vocab_size, size))
        slices = [*_WORDS, *LLTokenizer.general_slices()]
        return LLTokenizer(speller, eos_token=ends, slices=slices), speller.names
    except Exception as error:
        raise InputError(
            f"llguidance cannot read the tokenizer: {error}; leave the structure out"
        ) from None
