"""MMMU and MMMU-Pro: questions of college exams on images, in 30 subjects.

Data: https://mmmu-benchmark.github.io, or MMMU/MMMU and MMMU/MMMU_Pro on the Hugging Face hub. One
row, which may have more columns; images may be paths, data URLs, or Parquet's records:

    {"id": "validation_Art_1", "question": "Who painted <image 1>?", "options": "['Goya', 'Miro']",
     "question_type": "multiple-choice", "answer": "B", "image_1": "1.png"}

Prompts are those of the authors' scripts (https://github.com/MMMU-Benchmark/MMMU); images are
placed where a question names them. A list of right answers may be written as text, like options.

The published rules read choices and score free answers. Choices are read as by
parse_multi_choice_response in mmmu/utils/eval_utils.py and in mmmu-pro/evaluate.py of
https://github.com/MMMU-Benchmark/MMMU, free answers as by parse_open_response and eval_open in
mmmu/utils/eval_utils.py: a text has many readings, and one right reading is enough.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from treegen.evals.arguments import one_of, words
from treegen.evals.problem import Problem
from treegen.evals.verdict import Verdict
from treegen.tasks.common.files import column, optional, text_field
from treegen.tasks.common.images import Images, VisionTask, numbered_images
from treegen.tasks.common.sources import HubTable, bundled_rows, row_id

_DISCIPLINE: Final = {
    subject: row["discipline"]
    for _, row in bundled_rows("mmmu_disciplines.jsonl")
    for subject in row["subjects"]
}
SUBJECTS: Final = tuple(_DISCIPLINE)
_ID: Final = re.compile(r"[^_]+_(.+)_\d+")
_SETTINGS: Final = {
    "standard": "standard (10 options)",
    "standard-4": "standard (4 options)",
    "vision": "vision",
}
_LAST_LINE: Final = (
    "The last line of your response should be of the following format: 'Answer: $LETTER' (without "
    "quotes) where LETTER is one of options."
)
_DIRECT: Final = "Answer with the option letter from the given choices directly."
_COT: Final = f"{_LAST_LINE} Think step by step before answering."
# The prompts of MMMU-Pro, by whether the question is in the image.
_PRO: Final = {
    ("cot", True): f"Write out the multiple-choice question in the image and then solve it. {_COT}",
    ("cot", False): f"Answer the preceding multiple choice question. {_COT}",
    ("direct", True): f"{_DIRECT} {_LAST_LINE}",
    ("direct", False): _DIRECT,
}


class MMMU(VisionTask):
    """MMMU, by the authors' own parser and score.

    If a text has no readable choice, the filter `mmmu` guesses one, as published. `read` is the
    same without guesses.
    """

    name = "mmmu"
    filters = ("mmmu", "read")
    arguments: ClassVar = {
        "subjects": "subjects, separated by commas, such as Art,Math; default: all 30"
    }
    bundled = "mmmu_sample.jsonl"
    groups = ("discipline", "subject", "type")

    def hub(self) -> HubTable:
        """Return the table with the parts of the requested subjects."""
        return HubTable(
            "MMMU/MMMU", ("validation", "dev", "test"), _subjects(self.extra) or SUBJECTS
        )

    def is_selected(self, problem: Problem) -> bool:
        """Return whether a problem's subject is requested."""
        subjects = _subjects(self.extra)
        return not subjects or problem.metadata["subject"] in subjects

    def problem(self, row: dict[str, Any], line: int, images: Images) -> Problem:
        """Return the problem of a row, with choices or with a free answer.

        Args:
            row: The row.
            line: Line number of the row, from 1.
            images: Reads images of the row, given the problem's id and their values.
        """
        name, question = row_id(row, line, self.name), text_field(row, "question")
        is_choice = (optional(row, ("question_type",)) or "multiple-choice") == "multiple-choice"
        if is_choice:
            options = _options(row)
            listing = "".join(f"({a}) {b}\n" for a, b in zip(LETTERS, options, strict=False))
            ask = f"{listing}\nAnswer with the option's letter from the given choices directly."
            answer = {"answer": _letter(row, options), "options": options}
        else:
            ask = "Answer the question using a single word or phrase."
            answer = {"answer": _answers(row)}
        return Problem(
            name,
            f"{question}\n{ask}",
            json.dumps(answer),
            {**_parse_grouping(row, name, line), "type": "choice" if is_choice else "open"},
            images=images(name, numbered_images(row)),
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return the verdicts with and without guesses."""
        expected = json.loads(problem.answer)
        if "options" in expected:
            letter = mmmu_letter(text, expected["options"])
            return dict(zip(self.filters, _by_letter(letter, problem, text, expected), strict=True))
        answers = readings(text)
        right = answers.has(expected["answer"]) and bool(answers.shown)
        return dict.fromkeys(self.filters, Verdict(answers.shown or None, right))


class MMMUPro(VisionTask):
    """MMMU-Pro, by the authors' own parser and score; its filters work like those of MMMU."""

    name = "mmmu-pro"
    filters = ("mmmu-pro", "read")
    arguments: ClassVar = {
        "setting": "standard (10 options, the default), standard-4, or vision (the question is in "
        "the image)",
        "prompt": "cot (the default) or direct",
    }
    bundled = "mmmu_pro_sample.jsonl"
    groups = ("subject",)

    def hub(self) -> HubTable:
        """Return the table with the part of the requested setting."""
        return HubTable("MMMU/MMMU_Pro", ("test",), (_SETTINGS[_setting(self.extra)],))

    def problem(self, row: dict[str, Any], line: int, images: Images) -> Problem:
        """Return the problem of a row.

        Args:
            row: The row.
            line: Line number of the row, from 1.
            images: Reads images of the row, given the problem's id and their values.
        """
        name, options = row_id(row, line, self.name), _options(row)
        prompt = one_of(self.extra, "prompt", ("cot", "direct"), "cot")
        is_vision = _setting(self.extra) == "vision"
        question = _PRO[prompt, is_vision]
        if is_vision:
            if row.get("image") is None:
                raise ValueError(
                    "the row has no image, but in this setting the image contains the question"
                )
            image_values = [row["image"]]
        else:
            image_values = numbered_images(row)
            listing = "\n".join(f"{a}. {b}" for a, b in zip(LETTERS, options, strict=False))
            question = f"{text_field(row, 'question')}\n{listing}\n{question}"
        answer = {"answer": _letter(row, options), "options": options}
        grouping = {"line": line, "subject": optional(row, ("subject",)) or ""}
        return Problem(
            name, question, json.dumps(answer), grouping, images=images(name, image_values)
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return the verdicts with and without guesses."""
        expected = json.loads(problem.answer)
        letter = mmmu_pro_letter(text, expected["options"])
        return dict(zip(self.filters, _by_letter(letter, problem, text, expected), strict=True))


def _by_letter(
    letter: str | None, problem: Problem, text: str, expected: Mapping[str, Any]
) -> tuple[Verdict, Verdict]:
    """Return the verdicts with and without a guess where no letter is read."""
    guessed = letter or guess(problem.id, text, len(expected["options"]))
    right = expected["answer"]
    return Verdict(guessed, guessed == right), Verdict(letter, letter == right)


def _setting(extra: Mapping[str, str]) -> str:
    return one_of(extra, "setting", tuple(_SETTINGS), "standard")


def _subjects(extra: Mapping[str, str]) -> tuple[str, ...]:
    subjects = words(extra, "subjects")
    for subject in subjects:
        one_of({"subjects": subject}, "subjects", SUBJECTS, "")
    return subjects


def _parse_grouping(row: Mapping[str, Any], name: str, line: int) -> dict[str, Any]:
    """Return the fields by which tables group problems. The authors' ids contain the subject."""
    match = _ID.fullmatch(name)
    subject = optional(row, ("subject",)) or (match[1] if match else "")
    return {"line": line, "subject": subject, "discipline": _DISCIPLINE.get(subject, "")}


def _parse_list(value: Any, name: str) -> Any:
    """Return a list that may be written as text; return anything else unchanged."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            return ast.literal_eval(value.strip())
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            if name == "options":
                raise ValueError(f"{name} is not a list") from None
    return value


def _options(row: Mapping[str, Any]) -> list[str]:
    options = _parse_list(row.get("options"), "options")
    if not isinstance(options, list) or not 2 <= len(options) <= len(LETTERS):
        raise ValueError(f"options must be a list of 2 to {len(LETTERS)} texts")
    return [str(option) for option in options]


def _letter(row: Mapping[str, Any], options: list[str]) -> str:
    answer = column(row, ("answer",)).strip()
    if answer not in tuple(LETTERS[: len(options)]):
        raise ValueError(f"answer is {answer!r:.40}, not the letter of an option")
    return answer


def _answers(row: Mapping[str, Any]) -> list[str]:
    values_of_row = _parse_list(row.get("answer"), "answer")
    values = values_of_row if isinstance(values_of_row, list) else [values_of_row]
    answers = [str(value) for value in values if isinstance(value, str | int | float)]
    if not answers or any(not answer.strip() or answer.strip() == "?" for answer in answers):
        raise ValueError("answer is not text; the test split has no answers")
    return answers


LETTERS: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_STRIPPED: Final = ",.!?;:'"
_LONG: Final = 5  # a text with more words may quote the text of a choice


def mmmu_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the letter that MMMU's parser reads; None where the parser would guess.

    It is the first of these: the last "(B)", the last "B" between spaces, the choice quoted last.
    """
    text = _strip_marks(text)
    for form in (_in_brackets, _pad_letter):
        forms = [(letter, form(letter)) for letter in LETTERS[: len(options)]]
        if last := _find_last_form(text, forms):
            return last
    return _find_quoted_option(text, options)


def mmmu_pro_letter(text: str, options: Sequence[str]) -> str | None:
    """Return the letter that MMMU-Pro's parser reads; None where the parser would guess.

    If exactly one letter occurs after the last "Answer:", it is the answer. Otherwise the rules are
    those of `mmmu_letter`, but a letter also counts before a space or a full stop, as the "A" of
    "FDA approved". If there are several, the last one between spaces is read; without one between
    spaces, the first in the alphabet.
    """
    letters = LETTERS[: len(options)]
    _, announced, after = text.rpartition("Answer:")
    if announced and len(named := [letter for letter in letters if letter in after]) == 1:
        return named[0]
    text = _strip_marks(text)
    if last := _find_last_form(text, [(letter, _in_brackets(letter)) for letter in letters]):
        return last
    for end in (" ", "."):
        if named := [letter for letter in letters if f"{letter}{end}" in text]:
            return max(named, key=lambda letter: text.rfind(_pad_letter(letter)))
    return _find_quoted_option(text, options)


def guess(problem_id: str, text: str, num: int) -> str:
    """Return one of `num` letters, drawn by a hash, for a text without a readable choice.

    The published parsers also draw it, in an order of calls that is not documented.

    Args:
        problem_id: Id of the problem.
        text: Text of the sample.
        num: Number of choices.
    """
    digest = hashlib.sha256(f"{problem_id}\n{text}".encode("utf-8", "surrogatepass")).digest()
    return LETTERS[int.from_bytes(digest[:8], "big") % num]


def _in_brackets(letter: str) -> str:
    return f"({letter})"


def _pad_letter(letter: str) -> str:
    return f" {letter} "


def _strip_marks(text: str) -> str:
    """Return a text without the marks around it, between two spaces."""
    for mark in _STRIPPED:  # strip one mark at a time, as published, so an inner mark may stay
        text = text.strip(mark)
    return f" {text} "


def _find_quoted_option(text: str, options: Sequence[str]) -> str | None:
    if len(text.split()) <= _LONG:
        return None
    return _find_last_form(text.lower(), list(zip(LETTERS, (option.lower() for option in options))))  # noqa: B905


def _find_last_form(text: str, forms: Sequence[tuple[str, str]]) -> str | None:
    """Return the letter whose form begins last in a text; the first of equal ones."""
    starts = {letter: text.rfind(form) for letter, form in forms}
    best = max(starts, key=lambda letter: starts[letter], default=None)
    return None if best is None or starts[best] < 0 else best


Reading = str | float

_ANNOUNCING: Final = (
    "could be ",
    "so ",
    "is ",
    "thus ",
    "therefore ",
    "final ",
    "answer ",
    "result ",
)
_TRIVIAL: Final = frozenset(":,.!?;'")
# Each match begins at the start of a run of digits; otherwise long runs would take quadratic time.
_GROUPED: Final = re.compile(r"-?\b\d{1,3}(?:,\d{3})+\b")
_POWERS: Final = re.compile(r"-?(?<!\d)\d+(?:\.\d+)?[eE][+-]?\d+")
_PLAIN: Final = re.compile(r"-?(?:(?<!\d)\d+\.\d+|\.\d+|(?<!\d)\d+\b)(?![eE][+-]?\d+)(?![,\d])")
# The three patterns may each match a part of a number. Votes need the whole number: 1,000 is 1000.
_NUMBER: Final = re.compile(r"-?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?")


@dataclass(frozen=True, slots=True)
class ParsedAnswers:
    """The possible answers in a text."""

    readings: frozenset[Reading]
    """Its readings; numbers are rounded to two places."""
    shown: str
    """The reading used for votes: the last number, otherwise the last words."""

    def has(self, answers: Iterable[str]) -> bool:
        """Return whether a reading is one of the right answers, or contains one of them."""
        right = [reading for answer in answers for reading in _normal(answer)]
        words = [reading for reading in right if isinstance(reading, str)]
        return any(
            any(word in reading for word in words) if isinstance(reading, str) else reading in right
            for reading in self.readings
        )


def readings(text: str) -> ParsedAnswers:
    """Return the possible answers in a text."""
    stated = _find_stated(text)
    numbers = [number for part in stated for number in _numbers(part)]
    all_readings = frozenset(reading for part in (*stated, *numbers) for reading in _normal(part))
    last = _NUMBER.findall(stated[-1])
    # Adding 0 turns -0 into 0.
    answer = f"{float(_normal(last[-1])[0]) + 0:.12g}" if last else " ".join(stated[-1].split())
    return ParsedAnswers(all_readings, answer)


def _find_stated(text: str) -> list[str]:
    """Return the ends of lines that announce an answer; the whole text if none does."""
    text = text.strip().strip(".").lower()
    stated = []
    lines = text.split("\n")
    for number, line in enumerate(lines, start=1):
        shortest = ""
        for word in (*_ANNOUNCING, *(("=",) if number == len(lines) else ())):
            if word in line:
                end = line.rpartition(word)[2].strip()
                if not shortest or len(end) < len(shortest):
                    shortest = end
        if shortest and shortest not in _TRIVIAL:
            stated.append(shortest)
    return stated or [text]


def _numbers(text: str) -> Sequence[str]:
    return [number for kind in (_GROUPED, _POWERS, _PLAIN) for number in kind.findall(text)]


def _normal(text: str) -> list[Reading]:
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lower = text.lower()
        # A single letter must be a word of its own.
        return [f" {lower}", f"{lower} "] if len(lower) == 1 else [lower]
