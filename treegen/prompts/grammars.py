"""Grammars: JSON of a schema, a regular expression, a Lark grammar or a choice.

llguidance compiles a grammar for a tokenizer and returns which tokens may follow any prefix.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from treegen.common import bounded
from treegen.common.bounded.worker import FileWorker
from treegen.common.structured_outputs import read_structured_outputs
from treegen.common.synchronization import run_in_daemon
from treegen.errors import InputError, arg, install
from treegen.prompts.grammar_termination import has_finite_text, has_finite_value
from treegen.prompts.token_bytes import ByteSpeller
from treegen.prompts.tree import describe_lone_surrogate

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

Structure = tuple[str, str]
"""A kind, such as "json_schema", and its content as text."""


# The names in requests to vLLM's server.
_NAMES: Final = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
}
# Sets of tokens that a grammar often allows or forbids together. llguidance has such sets for JSON
# strings; these add words in regular expressions, and at least halve the time to compute masks. The
# masks themselves stay the same.
_WORDS: Final = ("[a-z]{1,30}", "[a-zA-Z0-9_]{1,30}")
# Parts of a Lark grammar: strings, comments, patterns, and names of tokens.
_LARK: Final = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>\s"]+>')
_MAX_COMPILE_SECONDS: Final = 30
# A grammar of a few hundred characters can take forever, because llguidance intersects patterns by
# search. Nothing stops a thread that does this, so a process compiles each grammar first.
_WORKER: Final = FileWorker(
    Path(bounded.__file__).with_name("grammar_worker.py"),
    None,
    seconds=20.0,
    memory=2 << 30,
    what="that compiles grammars",
    site=True,
)
_MAX_LANES: Final = 16
_SECONDS_OF_LANES: Final = 0.5  # limit of the time to compile all lanes of a grammar
_MAX_REASON_CHARS: Final = 200  # characters of llguidance's message
_Result = TypeVar("_Result")
JSON_SPACE: Final[Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
}
"""White space in JSON: as `json.dumps` writes it, unless a schema has its own `x-guidance`.

If any white space were allowed, a model could write nothing else until its token limit."""
REQUESTED: Final = ("response_format", "structured_outputs", *_NAMES)
"""Fields of requests that specify a structure, in OpenAI's protocol and in vLLM's."""


def parse_structure(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of SamplingParams for the parts of a request named in `REQUESTED`.

    Raises:
        InputError: a part is malformed.
    """
    arguments = {argument: fields[field] for field, argument in _NAMES.items() if field in fields}
    if structured_outputs := fields.get("structured_outputs"):
        arguments |= read_structured_outputs(structured_outputs)
    response_format = fields.get("response_format") or {}
    kind = response_format.get("type", "text") if isinstance(response_format, Mapping) else None
    if kind == "json_object":
        arguments["json_schema"] = {"type": "object"}
    elif kind == "json_schema":
        schema_format = response_format.get("json_schema")
        if not isinstance(schema_format, Mapping) or "schema" not in schema_format:
            raise InputError(
                "a response_format with the type json_schema must contain json_schema.schema"
            )
        arguments["json_schema"] = schema_format["schema"]
    elif kind != "text":
        raise InputError("response_format must have the type text, json_object or json_schema")
    return arguments


class Grammar:
    """A grammar compiled for one tokenizer.

    Attributes:
        num_words: 32-bit words in a mask, which has a bit for each token.
        num_lanes: Number of lanes for `start`.
    """

    def __init__(
        self, structure: Structure, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int
    ) -> None:
        """Compile a grammar.

        Args:
            structure: The kind of grammar, and its text.
            tokenizer: The model's tokenizer.
            eos_ids: The tokens that end a sample.
            vocab_size: Number of the model's logits per token.

        Raises:
            InputError: it cannot be read, no text can satisfy it, or llguidance is missing.
        """
        if find_spec("llguidance") is None:
            raise InputError(
                f"{structure[0]} needs llguidance; install it with: {install('structured')}"
            )
        kind, text = structure
        if problem := describe_lone_surrogate(text):
            raise InputError(f"{arg(kind)} {problem}")
        tokens, self._names = _tokens_of(tokenizer, len(tokenizer), tuple(eos_ids), vocab_size)
        self._tokens = tokens
        self.num_words = -(-tokens.vocab_size // 32)
        self._lanes = [_run_with_timeout(kind, lambda: self._compile(kind, text))]
        if self._lanes[0].is_error():
            raise _make_grammar_error(kind, self._lanes[0].get_error())

    def start(self, lane: int = 0) -> LLMatcher:
        """Return a matcher at the start of a text.

        Args:
            lane: Index of the lane. Matchers of one lane share their caches and one lock, so they
                run one after another, and those of several lanes in parallel. Default: 0.
        """
        if (num_missing := lane + 1 - len(self._lanes)) > 0:
            with ThreadPoolExecutor() as threads:
                futures = [threads.submit(self._new) for _ in range(num_missing)]
            self._lanes += [future.result() for future in futures]
        return self._lanes[lane].deep_copy()

    def _compile(self, kind: str, text: str) -> LLMatcher:
        self._compiled = _compile_structure(kind, text)
        if kind == "grammar":
            self._compiled = _replace_names(self._compiled, self._names)
        if _WORKER.ask(self._compiled) is None:
            raise InputError(
                f"compiling {arg(kind)} takes too much time or memory; simplify the value"
            )
        start = time.perf_counter()
        matcher = self._new()
        self.num_lanes = _num_lanes(time.perf_counter() - start)
        return matcher

    def _new(self) -> LLMatcher:
        from llguidance import LLMatcher

        return _warm_up(LLMatcher(self._tokens, self._compiled, log_level=0))


def grammar_of(
    structure: Structure | None, tokenizer: Any, eos_ids: Sequence[int], vocab_size: int
) -> Grammar | None:
    """Return the compiled grammar of a structure; None if there is no structure.

    Args:
        structure: The kind of grammar, and its text; None for none.
        tokenizer: The model's tokenizer.
        eos_ids: The tokens that end a sample.
        vocab_size: Number of the model's logits per token.

    Raises:
        InputError: as for `Grammar`.
    """
    return None if structure is None else Grammar(structure, tokenizer, eos_ids, vocab_size)


def _num_lanes(seconds: float) -> int:
    """Return the number of lanes of a grammar that took `seconds` to compile."""
    return min(max(int(_SECONDS_OF_LANES / max(seconds, 1e-9)), 1), _MAX_LANES)


def _warm_up(matcher: LLMatcher) -> LLMatcher:
    """Compute the first mask of a matcher, so that copies have it; skip a failed matcher."""
    if not matcher.is_error():
        matcher.compute_bitmask()
    return matcher


def _compile_structure(kind: str, text: str) -> str:
    """Return a structure in llguidance's form."""
    from llguidance import LLMatcher, grammar_from

    match kind:
        case "json_schema":
            schema = json.loads(text)
            if not has_finite_value(schema):
                raise InputError(
                    f"no finite JSON text can match {arg('json_schema')}, because a required "
                    "property contains itself; remove the property from `required`"
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
        grammar = str(grammar_from("grammar", text))
    except (ValueError, RecursionError) as error:
        raise _make_grammar_error(kind, str(error)) from None
    if not has_finite_text(grammar):
        raise InputError(
            "the grammar matches no finite text, because its rule `start` never terminates; add an "
            "alternative that terminates"
        )
    return grammar


def _replace_names(lark: str, ids: Mapping[str, int]) -> str:
    """Return a grammar with the `<name>` of each added token that is text replaced by its id."""
    return _LARK.sub(lambda match: f"<[{ids[match[0]]}]>" if match[0] in ids else match[0], lark)


def _make_grammar_error(kind: str, message: str) -> InputError:
    """Return the error for a grammar that llguidance rejects.

    Args:
        kind: The parameter with the grammar.
        message: The message of llguidance.
    """
    if "coerce_one_of" in message:
        return InputError(
            f"{arg(kind)} cannot be used: the alternatives of oneOf may overlap, which is not "
            "supported; use anyOf instead"
        )
    reason = textwrap.shorten(_find_reason(kind, message), _MAX_REASON_CHARS)
    return InputError(f"{arg(kind)} cannot be used: {reason}; correct the value")


def _find_reason(kind: str, message: str) -> str:
    """Return the reason in a message of llguidance, on one line; `kind` is as in a Structure."""
    lines = message.strip().splitlines() or ["llguidance rejected the value"]
    # The location in a Lark grammar, and what is wrong with a regular expression there.
    found = re.match(r"(at \d+\(\d+\): )?(?:invalid regex .* \(in regex\): )?(.*)", lines[0])
    assert found is not None
    location, reason = found[1] or "", found[2]
    if "lookarounds not supported" in reason:
        reason = r"look-around, such as \b, is not supported"
    # The next lines are the expression, a line of ^ below its part, and the reason.
    if reason == "regex parse error:":
        reasons = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
        reason = "".join(reasons[:1]) or "invalid regular expression"
        if len(lines) > 2 and (marks := re.fullmatch(r" *(\^+)", lines[2])):
            part = lines[1][slice(*marks.span(1))]
            reason += f": {part}" if part else ""
    return reason if kind == "regex" else f"{location}{reason}"


def _run_with_timeout(kind: str, make: Callable[[], _Result]) -> _Result:
    """Return the result of a function; raise InputError, and leave it in its thread, if late."""
    result = run_in_daemon("treegen-grammar", make)
    if not wait([result], _MAX_COMPILE_SECONDS).done:
        raise InputError(
            f"compiling {arg(kind)} takes more than {_MAX_COMPILE_SECONDS} seconds; simplify the "
            "value"
        )
    return result.result()


@functools.lru_cache(maxsize=4)
def _tokens_of(
    tokenizer: Any, size: int, eos_ids: tuple[int, ...], vocab_size: int
) -> tuple[LLTokenizer, Mapping[str, int]]:
    """Return the tokens of a tokenizer in llguidance's form; takes a second for a large one.

    Args:
        tokenizer: A transformers tokenizer.
        size: Its length, part of the key because tokens may be added to a tokenizer later.
        eos_ids: The tokens that end a sample.
        vocab_size: Number of the model's logits per token.

    Returns:
        The tokens, and the ids of added tokens that are text, by their content.

    Raises:
        InputError: the tokenizer is not a fast one, or has no end-of-text token.
    """
    from llguidance import LLTokenizer

    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise InputError("structured output needs a fast tokenizer (tokenizer.json)")
    ends = [token for token in eos_ids if token < vocab_size]
    if not ends:
        raise InputError("structured output needs a model with an end-of-sequence token")
    try:
        speller: Any = ByteSpeller(tokenizer, ends, max(vocab_size, size))
        slices = [*_WORDS, *LLTokenizer.general_slices()]
        return LLTokenizer(speller, eos_token=ends, slices=slices), speller.names
    except Exception as error:
        raise InputError(
            f"llguidance cannot read the tokenizer: {error}; generate without structured output"
        ) from None
