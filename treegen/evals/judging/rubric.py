"""Rubrics: instructions for a judge, its possible verdicts, and the value of each verdict.

A rubric is a YAML file, or a Jinja file that sets `choices`. Its wordings express the same
instructions in different words. Criteria are judged one by one, below the text that they share.
Templates are sandboxed Jinja; what prompts share depends on the order of their fields.

Readers find verdicts in texts of judges; a text without a verdict is unreadable, never a 0.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from treegen.common.bounded.templates import TemplateError, read_set, render_rubric
from treegen.common.files import FileTooLargeError, as_path, read_text
from treegen.common.spelling import did_you_mean
from treegen.common.yaml_texts import MAX_YAML_BYTES, parse_yaml
from treegen.errors import InputError

Reader = Callable[[str, Sequence[str]], str | None]
"""Maps a text and the choices of a rubric to a verdict; None if the text has no verdict."""

_VERDICT_LINE: Final = re.compile(r"[*_`\s]*+verdict[*_`]*+\s*+:(.*)", re.IGNORECASE)
_MARKUP: Final = re.compile(r"[*_`\s]*+")  # Markdown around a verdict
_RATING: Final = re.compile(r"\[\[(\d++\.?+\d*+)\]\]")
_RATING_BACKUP: Final = re.compile(r"\[(\d++\.?+\d*+)\]")


def last_line(text: str, choices: Sequence[str]) -> str | None:
    """Read the verdict from a last line "Verdict: X", where X is a choice in any case.

    If lines of this form name different choices, the text has no verdict.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    spelling = {choice.casefold(): choice for choice in choices}
    matches = [_VERDICT_LINE.fullmatch(line) for line in lines]
    if not matches or matches[-1] is None:
        return None
    verdicts = {
        spelling.get(_strip_markup(_strip_markup(match[1]).removesuffix(".")).casefold())
        for match in matches
        if match
    }
    return verdicts.pop() if len(verdicts) == 1 else None


def _strip_markup(text: str) -> str:
    """Return a text without white space and Markdown's marks around it, in linear time."""
    for _ in range(2):  # one regular expression for both ends would take quadratic time
        text = _MARKUP.sub("", text, count=1)[::-1]
    return text


def simpleqa(text: str, choices: Sequence[str]) -> str | None:
    """Read the verdict like SimpleQA of simple-evals: the first A, B or C anywhere, C by default.

    So "INCORRECT" is a C, because it contains the letter. Source: openai/simple-evals,
    simpleqa_eval.py.
    """
    match = re.search("[ABC]", text)
    return match[0] if match else "C"


def mt_bench(text: str, choices: Sequence[str]) -> str | None:
    """Read the rating like MT-Bench's single-answer grading: first [[rating]], or else [rating].

    The rule is that of lm-sys/FastChat, llm_judge/common.py. There a text without a rating has the
    score -1, and show_result.py leaves it out.
    """
    match = _RATING.search(text) or _RATING_BACKUP.search(text)
    return match[1] if match else None


def mt_bench_pair(text: str, choices: Sequence[str]) -> str | None:
    """Read the verdict like MT-Bench's pairwise grading: [[A]], or else [[B]], or else [[C]] (tie).

    The rule is that of lm-sys/FastChat, llm_judge/common.py, where a text without a verdict is an
    "error".
    """
    return next((letter for letter in "ABC" if f"[[{letter}]]" in text), None)


READERS: Final[Mapping[str, Reader]] = {
    "last-line": last_line,
    "simpleqa": simpleqa,
    "mt-bench": mt_bench,
    "mt-bench-pair": mt_bench_pair,
}


FIELDS: Final = ("question", "reference", "answer", "answer_a", "answer_b", "criterion")
"""Fields that a template may show, ordered by how often they differ between prompts."""


class RubricTemplate:
    """One wording of a rubric.

    Attributes:
        source: The Jinja text.
        fields: The fields that it shows, each once, in the order of their first occurrence.
    """

    def __init__(self, source: str, name: str) -> None:
        """Render a template once to find its fields.

        Args:
            source: The Jinja text.
            name: Name of the template in error messages.

        Raises:
            InputError: the text is not valid Jinja, uses an unknown field, or takes too long.
        """
        self.source, self._name = source, name
        placeholders = {field: f"\0{field}\0" for field in FIELDS}
        try:
            rendered = render_rubric(source, placeholders)
        except TemplateError as error:
            raise InputError(
                f"{name} is not a valid template: {error}; available fields: {', '.join(FIELDS)}"
            ) from None
        position_of = {field: rendered.find(text) for field, text in placeholders.items()}
        shown = [field for field in FIELDS if position_of[field] >= 0]
        self.fields: tuple[str, ...] = tuple(sorted(shown, key=position_of.__getitem__))

    def render(self, values: Mapping[str, str]) -> str:
        """Return the prompt for these values of fields.

        Raises:
            InputError: the template uses a missing value, or takes too long.
        """
        try:
            return render_rubric(self.source, values).strip("\n")
        except TemplateError as error:
            raise InputError(
                f"{self._name} cannot be rendered: {error}; fix the template"
            ) from None

    def find_misplaced(self) -> str:
        """Return a sentence on fields in an order that reduces sharing; empty if the order is good.

        Prompts share the text before their first difference, so a field that is equal for many
        prompts belongs before a field that differs more often.
        """
        ranks = [FIELDS.index(field) for field in self.fields]
        for index, (field, rank) in enumerate(zip(self.fields, ranks, strict=True)):
            late = [self.fields[i] for i in range(index + 1, len(ranks)) if ranks[i] < rank]
            if late:
                return (
                    f"{self._name} shows {field} before {' and '.join(late)}, so prompts that "
                    f"differ in {field} share no text after {field}; move {field} to the end"
                )
        return ""


def check_fields(templates: Sequence[RubricTemplate], needed: Sequence[str], name: str) -> None:
    """Raise InputError unless every template shows all needed fields.

    Args:
        templates: The wordings of a rubric.
        needed: Names of the fields that each template must show.
        name: Name of the rubric in the error message.
    """
    for number, template in enumerate(templates):
        if lacking := [field for field in needed if field not in template.fields]:
            raise InputError(
                f"wording {number + 1} of the rubric {name} does not show {', '.join(lacking)}; "
                f"add {{{{ {lacking[0]} }}}} to the wording"
            )


BUILT_IN: Final = ("correctness", "rating", "pairwise", "simpleqa")
VERDICT_PREFIX: Final = "Verdict:"
"""The text before a verdict."""
_KEYS: Final = ("name", "choices", "wordings", "criteria", "reader", "pairs", "system")


@dataclass(frozen=True)
class Rubric:
    """Instructions for judges, and the values of verdicts."""

    name: str
    """The name in reports."""
    choices: Mapping[str, float]
    """The possible verdicts, and the value of each."""
    wordings: tuple[str, ...]
    """Jinja templates that express the same instructions in different words."""
    criteria: tuple[tuple[str, float], ...] = ()
    """(text, weight) of each criterion that is judged separately; empty if an answer is judged as a
    whole."""
    reader: str = "last-line"
    """The name of the function that reads verdicts in texts; see `READERS`."""
    pairs: bool = False
    """Whether two answers are compared. The first choice then means that the first answer is
    better, the second choice that the second answer is, and a third choice is a tie."""
    system: str = ""
    """A system turn for judges with a chat template; without one it precedes the prompt."""

    def __post_init__(self) -> None:
        _check(self)
        needed = ["answer_a", "answer_b"] if self.pairs else ["answer"]
        check_fields(self.templates, needed + ["criterion"] * bool(self.criteria), self.name)

    @cached_property
    def templates(self) -> tuple[RubricTemplate, ...]:
        """The compiled templates of the wordings."""
        number = len(self.wordings)
        return tuple(
            RubricTemplate(text, f"wording {i + 1} of {number} of the rubric {self.name}")
            for i, text in enumerate(self.wordings)
        )

    @property
    def min_value(self) -> float:
        """The smallest value of a verdict."""
        return min(self.choices.values())

    @property
    def max_value(self) -> float:
        """The largest value of a verdict."""
        return max(self.choices.values())

    @property
    def defines_verdict_format(self) -> bool:
        """Whether the wordings themselves define the format of a verdict."""
        return self.reader != "last-line"

    def ending(self, *, reasons: bool) -> str:
        """Return the end of a prompt, which defines the format of the verdict.

        Args:
            reasons: Whether the judge writes its reasons before the verdict.
        """
        if self.defines_verdict_format:
            return ""
        choices = ", ".join(self.choices)
        if reasons:
            return (
                "\n\nGive your reasons first, in a few sentences. End with a line of its own: "
                f'"{VERDICT_PREFIX} X", where X is one of {choices}.'
            )
        return f'\n\nReply with "{VERDICT_PREFIX} X" and nothing else, where X is one of {choices}.'

    def read(self, text: str) -> str | None:
        """Return the verdict in a text; None if the text has none of the choices."""
        verdict = READERS[self.reader](text, tuple(self.choices))
        if verdict in self.choices:
            return verdict
        # A rating may be written differently, such as 7.0 for 7.
        number = _number(verdict)
        same = [
            choice for choice in self.choices if number is not None and number == _number(choice)
        ]
        return same[0] if same else None

    def describe_misplaced(self, num_wordings: int) -> list[str]:
        """Return a sentence for each wording whose order of fields makes prompts share little.

        Args:
            num_wordings: Number of wordings to check, from the first.
        """
        sentences = [template.find_misplaced() for template in self.templates[:num_wordings]]
        return [sentence for sentence in sentences if sentence]

    def to_json(self) -> dict[str, Any]:
        """Return the rubric as a mapping like that of a file; `of_json` reads it."""
        criteria = [{"text": text, "weight": weight} for text, weight in self.criteria]
        return {**asdict(self), "wordings": list(self.wordings), "criteria": criteria}

    @property
    def fingerprint(self) -> str:
        """A hash of the rubric; the number of used wordings is not part of it."""
        content = json.dumps(self.to_json(), sort_keys=True).encode()
        return hashlib.blake2b(content, digest_size=8).hexdigest()


def load_rubric(name: "str | Path | Mapping[str, Any] | Rubric") -> Rubric:
    """Load a rubric.

    Args:
        name: The name of a built-in rubric, a .yaml, .yml, .jinja or .j2 file, a mapping with the
            keys of a file, or a rubric, which is returned unchanged.

    Raises:
        InputError: there is no such rubric, or it cannot be used.
    """
    if isinstance(name, Rubric):
        return name
    if isinstance(name, Mapping):
        return of_json(name, "the rubric")
    if str(name) in BUILT_IN:
        source = files("treegen.evals.judging").joinpath("rubrics", f"{name}.yaml")
        return of_json(_yaml(source.read_text(encoding="utf-8"), str(name)), str(name))
    path = as_path("rubric", name)
    if path.suffix not in (".yaml", ".yml", ".jinja", ".j2"):
        known = f"; use {', '.join(BUILT_IN)}, or a .yaml or .jinja file"
        hint = did_you_mean(str(name), BUILT_IN) or known
        raise InputError(f"there is no rubric {str(name)!r}{hint}")
    try:
        text = read_text(path, MAX_YAML_BYTES)
    except FileTooLargeError:
        raise InputError(
            f"the rubric {path} must have at most {MAX_YAML_BYTES:,} bytes; shorten the file"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"the rubric {path} cannot be read: {error}; use a text file in UTF-8"
        ) from None
    if path.suffix in (".yaml", ".yml"):
        return of_json(_yaml(text, str(path)), path.stem)
    return of_json({"wordings": [text], **_set_in(text, str(path))}, path.stem)


def of_json(content: Mapping[str, Any], name: str) -> Rubric:
    """Return the rubric of a mapping with the keys of a file.

    Args:
        content: The mapping.
        name: Name of the rubric if the mapping has none; also used in error messages.

    Raises:
        InputError: a key is unknown, or a value cannot be used.
    """
    try:
        return _of_json(content, name)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, InputError):
            raise
        # For example, a list instead of a word, or a number with thousands of digits.
        raise InputError(f"{name} has an invalid value: {error}; correct the value") from None


def _of_json(content: Mapping[str, Any], name: str) -> Rubric:
    if not isinstance(content, Mapping):
        raise InputError(f"{name} must be a mapping with the keys choices and wordings")
    for key in content:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS) or f"; known: {', '.join(_KEYS)}"
            raise InputError(f"{name} has the unknown key {key!r}{hint}")
    choices, wordings = content.get("choices"), content.get("wordings")
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        choices = {item: item for item in choices}  # the value of each number is the number itself
    if not isinstance(choices, Mapping) or len(choices) < 2:
        raise InputError(f"{name} needs choices: two or more verdicts and their values")
    if isinstance(wordings, str):
        wordings = [wordings]
    if not isinstance(wordings, Sequence) or not wordings:
        raise InputError(f"{name} needs wordings: a list of one or more texts")
    criteria, pairs = content.get("criteria") or (), content.get("pairs")
    if not isinstance(criteria, Sequence) or isinstance(criteria, str):
        raise InputError(f"{name}: criteria must be a list of texts, got {criteria!r:.60}")
    if pairs is not None and not isinstance(pairs, bool):
        raise InputError(f"{name}: pairs must be true or false, got {pairs!r:.60}")
    return Rubric(
        name=str(content.get("name", name)),
        choices={_format_value(key): _value(value, name) for key, value in choices.items()},
        wordings=tuple(_text(item, name) for item in wordings),
        criteria=tuple(_criterion(item, name) for item in criteria),
        reader=str(content.get("reader", "last-line")),
        pairs=bool(pairs),
        system=str(content.get("system") or ""),
    )


def _check(rubric: Rubric) -> None:
    name = rubric.name
    if not name or len(name) > 80:
        raise InputError(f"a rubric's name must have 1 to 80 characters, got {name!r:.100}")
    if rubric.reader not in READERS:
        hint = did_you_mean(rubric.reader, READERS) or f"; known: {', '.join(READERS)}"
        raise InputError(f"{name}: there is no reader {rubric.reader!r}{hint}")
    if any(not choice or choice != choice.strip() or "\n" in choice for choice in rubric.choices):
        raise InputError(f"{name}: each choice must be one line of text without spaces around it")
    if len({choice.casefold() for choice in rubric.choices}) < len(rubric.choices):
        raise InputError(
            f"{name} has choices that differ only in upper and lower case; rename one of "
            "these choices"
        )
    if rubric.min_value == rubric.max_value:
        raise InputError(
            f"{name}: all choices have the value {rubric.min_value:g}; give at least two values"
        )
    if rubric.pairs and (
        len(rubric.choices) not in (2, 3) or list(rubric.choices.values()) not in _PAIR_VALUES
    ):
        raise InputError(
            f"{name} compares pairs, so its choices must have the values 1 (the first answer is "
            "better), 0 (the second is better) and, if there is a third choice, 0.5 (a tie), "
            "in this order"
        )


_PAIR_VALUES: Final = ([1.0, 0.0], [1.0, 0.0, 0.5])


def _yaml(text: str, name: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise InputError(f"{name} is not valid YAML: {error}; fix the line") from None


def _set_in(text: str, name: str) -> dict[str, Any]:
    """Return the keys of a rubric that a Jinja file sets, as in `{% set choices = ... %}`."""
    try:
        values = read_set(text, dict.fromkeys(FIELDS, ""), _KEYS)
    except TemplateError as error:
        raise InputError(f"{name} is not a valid template: {error}; fix the template") from None
    if "choices" not in values:
        raise InputError(
            f"{name} sets no choices; begin the file with "
            '{% set choices = {"yes": 1, "no": 0} %}'
        )
    return values


def _format_value(value: object) -> str:
    # YAML reads a bare yes as True.
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _value(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{name}: the value of a choice must be a number, got {value!r:.40}")
    return float(value)


def _text(value: object, name: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise InputError(f"{name}: a wording must be text, got {value!r:.40}")
    return value


def _criterion(value: object, name: str) -> tuple[str, float]:
    if isinstance(value, str) and value.strip():
        return value, 1.0
    if isinstance(value, Mapping) and set(value) <= {"text", "weight"}:
        weight = _value(value.get("weight", 1.0), name)
        if isinstance(value.get("text"), str) and value["text"].strip() and weight > 0:
            return value["text"], weight
    raise InputError(
        f"{name}: a criterion must be a string, or a mapping with a text and an optional weight "
        f"above 0; got {value!r:.60}"
    )


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
