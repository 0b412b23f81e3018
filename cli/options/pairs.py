"""Read `name=value,name=value` arguments, such as --model-args and --gen-kwargs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from treegen.common.foreign_names import FOREIGN, advise_foreign
from treegen.common.params import PENALTIES, SamplingParams
from treegen.common.spelling import suggest_arguments
from treegen.errors import InputError
from treegen.evals.arguments import TRUTHS
from treegen.model.options import EngineOptions


def _bool(text: str) -> bool:
    return TRUTHS[text.lower()]


Reader = Callable[[str], Any]


def _reader(annotation: str) -> Reader:
    """Return the function that parses an option of the type with this annotation."""
    if "bool" in annotation:
        return _bool
    if "str" in annotation:
        return str
    return float if "float" in annotation else int if "int" in annotation else str


def _readers(settings: type, *names: str) -> dict[str, Reader]:
    """Return the parsers of all settings, or of those named."""
    kinds = {field.name: _reader(str(field.type)) for field in fields(settings)}
    return {name: kinds[name] for name in names or kinds}


MODEL_ARGS: Final[Mapping[str, Reader]] = _readers(EngineOptions)
GEN_KWARGS: Final[Mapping[str, Reader]] = {
    **_readers(
        SamplingParams,
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "max_tokens",
        "stop",
        "stop_token_ids",
        "ignore_eos",
        "seed",
        *PENALTIES,
    ),
    "do_sample": _bool,
}
CONFIDENCE: Final[Mapping[str, Reader]] = {"top": int, "window": int, "keep": float, "warmup": int}
# Names that other tools use for these.
ALIASES: Final = {
    name: FOREIGN[name]
    for name in ("pretrained", "batch_size", "max_gen_toks", "max_new_tokens", "until")
}
_KINDS: Final[Mapping[Reader, str]] = {
    int: "an integer",
    float: "a number",
    _bool: "true or false",
}
_REPEATABLE: Final = ("stop", "stop_token_ids", "bad_words")


def read_pairs(texts: Sequence[str], flag: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Return the values of comma-separated name=value pairs.

    stop, stop_token_ids and bad_words may occur several times.

    Args:
        texts: The texts of the option, one for each time that it was typed.
        flag: The name of the option, for error messages.
        readers: The parser of each allowed name.

    Raises:
        InputError: a text has another form.
    """
    all_names = f"; known: {', '.join(readers)}"
    named: list[tuple[str, str]] = []
    for pair in (pair.strip() for text in texts for pair in text.split(",")):
        if not pair:
            continue
        name, equals, value = pair.partition("=")
        if not equals:
            raise InputError(f"{flag}: expected name=value, got {pair!r}{all_names}")
        name = name.strip().replace("-", "_")
        named.append((ALIASES.get(name, name), value))
    if unknown := [name for name, _ in named if name not in readers]:
        hints = suggest_arguments(unknown, lambda name: _advice(name, readers), all_names)
        raise InputError(f"{flag} has no {' and no '.join(map(repr, unknown))}{hints}")
    values: dict[str, Any] = {}
    for name, value in named:
        try:
            read = readers[name](value.strip())
        except (KeyError, ValueError):
            raise InputError(
                f"{flag}: {name} must be {_KINDS[readers[name]]}, got {value!r}"
            ) from None
        if name in _REPEATABLE:
            values[name] = (*values.get(name, ()), read)
        elif name in values and values[name] != read:
            raise InputError(
                f"{flag}: {name} is given twice, as {values[name]!r} and {read!r}; remove one "
                "of the two values"
            )
        else:
            values[name] = read
    return values


def _advice(name: str, readers: Mapping[str, Reader]) -> str:
    """Return "; " and advice on a name of another tool, or ""."""
    advice = advise_foreign(name, readers)[1]
    return f"; {advice}" if advice else ""
