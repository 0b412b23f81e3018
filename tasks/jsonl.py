r"""Questions and answers of your own in a JSONL file, without any code.

    treegen eval jsonl --data questions.jsonl -T answer=number

One row. The file may have any fields; the template names the fields to use:

    {"question": "What is 6 times 7?", "answer": 42}

The default template makes the prompt "Q: What is 6 times 7?\nA:". Few-shot examples, from a file of
such rows, are placed before every problem. Each consists of its prompt, a space, its "target" (or
its answer, if it has no target) and a blank line.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, ClassVar, Final

from treegen.common.spelling import did_you_mean
from treegen.errors import DataError, InputError, arg
from treegen.evals.arguments import check_arguments, one_of, whole_number
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.selection import select
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import AnswerType, Verdict
from treegen.prompts.images.loading import is_image, source_of
from treegen.tasks.answers.canonical import (
    CanonicalAnswer,
    ChoiceAnswer,
    ContainedAnswer,
    NumberAnswer,
    PatternAnswer,
    TextAnswer,
)
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.common.fewshot import pick_turns
from treegen.tasks.common.files import text_field
from treegen.tasks.common.images import RowImages
from treegen.tasks.common.sources import Source, problems_of
from treegen.tasks.common.text_task import TextTask, greedy


@dataclass(frozen=True, slots=True)
class Template:
    """Text with the names of fields in braces."""

    parts: tuple[tuple[str, str | None], ...]
    """Each is a text and the name of the field after it, or None."""

    @property
    def fields(self) -> list[str]:
        """The names of all fields, in the order of their first use."""
        return list(dict.fromkeys(name for _, name in self.parts if name is not None))

    def fill(self, row: Mapping[str, Any]) -> str:
        """Return the text with a row's values.

        Raises:
            ValueError: A field is missing, or is neither text nor a number.
        """
        return "".join(text + (field_text(row, name) if name else "") for text, name in self.parts)


def parse_template(text: str) -> Template:
    """Parse a template, in which {{ and }} are literal braces.

    Raises:
        DataError: The text is not a template, or names no field.
    """
    try:
        parsed = list(Formatter().parse(text))
    except ValueError as error:
        # Python's own words, such as "Single '}' encountered in format string", are clear enough.
        raise DataError(
            f"template {text!r}: {str(error).lower()}; write {{{{ or }}}} for a brace"
        ) from None
    parts = []
    for literal, name, form, conversion in parsed:
        # {a.b} and {a!r} would reach into values; only whole fields are texts.
        if name is not None and (
            form or conversion or not name.strip() or set(name) & set(".[]{}")
        ):
            raise DataError(
                f"template {text!r}: {{...}} must contain only a field name; write "
                "{{ or }} for a brace"
            )
        parts.append((literal, None if name is None else name.strip()))
    if not any(name for _, name in parts):
        raise DataError(
            f"template {text!r} contains no field, so all prompts would be the same; "
            f"add a field, such as {{question}}"
        )
    return Template(tuple(parts))


def field_text(row: Mapping[str, Any], name: str) -> str:
    """Return a field of a row as text; a number is written as in JSON.

    Raises:
        ValueError: The field is missing, or is neither text nor a number.
    """
    value = row.get(name)
    if isinstance(value, int | float):
        return json.dumps(value)
    return text_field(row, name)


def chat_of(row: Mapping[str, Any], name: str) -> tuple[tuple[dict[str, Any], ...], list[Any]]:
    """Return the chat messages in a field of a row, and the images in them.

    In the messages each image is replaced by its index in the list of images.

    Raises:
        ValueError: The field has no messages, or a message is invalid.
    """
    value = row.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is not a list of chat messages")
    images: list[Any] = []
    return tuple(
        _message(message, f"{name}[{at}]", images) for at, message in enumerate(value)
    ), images


def chat_text(messages: tuple[dict[str, Any], ...]) -> str:
    """Return a chat as text for people."""
    return "\n".join(
        f"{message['role']}: {_content_to_text(message.get('content') or '')}"
        for message in messages
    )


def _message(message: Any, where: str, images: list[Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError(f"{where} is not a chat message; write an object with role and content")
    content = message.get("content")
    if not isinstance(content, list):
        if content is not None and not isinstance(content, str):
            raise ValueError(f"the content of {where} is neither text nor a list of parts")
        return dict(message)
    return {**message, "content": [_part(part, where, images) for part in content]}


def _part(part: Any, where: str, images: list[Any]) -> dict[str, Any]:
    if is_image(part):
        try:
            images.append(source_of(part))
        except InputError as error:
            raise ValueError(f"{where}: {error}") from None
        return {"type": "image", "image": len(images) - 1}
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(f"a part of {where} is neither text nor an image")
    return {"type": "text", "text": part["text"]}


def _content_to_text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(
        f"<image {part['image'] + 1}>" if is_image(part) else part["text"] for part in content
    )


ANSWERS: Final = ("text", "contains", "number", "math", "choice", "regex")
# The older names of answer types, which were called metrics.
METRICS: Final = {"exact": "text", "contains": "contains", "numeric": "number", "regex": "regex"}
_TEMPLATE: Final = "Q: {question}\nA:"
_SOURCE: Final = Source(task="jsonl", bundled="")
# Names of the fields of questions and answers in data of others.
_QUESTIONS: Final = ("question", "problem", "prompt", "query", "input", "instruction", "text")
_ANSWERS: Final = (
    "answer",
    "gold",
    "target",
    "label",
    "reference",
    "expected",
    "solution",
    "result",
    "output",
)


class QuestionAnswer(TextTask):
    """A JSONL file of questions with one right answer each, or a list of right answers.

    The answer type defines how a text is read and compared. "text" compares the whole text.
    "contains" searches the text for the answer. The others compare what the text gives as its
    answer: "number" a number, "math" a mathematical expression, "choice" a letter. "regex" compares
    the last match of a pattern. Spacing around and within answers is ignored. Case is ignored if
    `ignore_case` is set.
    """

    name = "jsonl"
    needs_data = "a JSONL file"
    version = "2"
    filters = ("answer",)
    arguments: ClassVar = {
        "template": r"prompt template with fields in braces; default: Q: {question}\nA:",
        "answer": "the answer type: text, contains, number, math, choice or regex; default: text",
        "metric": "older name for answer: exact, contains, numeric or regex; no default",
        "choices": "for answer=choice: number of choices, lettered from A; default: 4",
        "ignore_case": "yes or no: whether A and a are the same; default: no",
        "pattern": "for answer=regex: pattern; the answer is its group, or its whole match; "
        "no default",
        "answer_field": "the field with the right answer, or a list of them; default: answer",
        "group_field": "the field that clusters problems for intervals, such as a passage; no "
        "default",
        "image_field": "the field with an image or a list of images, as paths relative to the "
        "file or data URLs; <image 1> in the prompt is the first; needs --images; no default",
        "messages_field": "the field with chat messages to use as the prompt; their parts may be "
        "images; no default",
        "id_field": "the field with a problem's id; default: id, if rows have one, else the line",
    }
    # A blank line ends an answer, because one follows each example.
    defaults: Final = greedy(max_tokens=256, stop=("\n\n",))

    _answer: CanonicalAnswer | MathAnswer = TextAnswer()  # until `load` sets another type

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """The answer type that `load` selected."""
        return {"answer": self._answer}

    def load(self, options: TaskOptions) -> TaskData:
        """Read problems and examples. A problem is never one of its own examples.

        Raises:
            InputError: There is no file, an option is invalid, or there are too few examples.
            DataError: The file or the template cannot be read, no problem can be used, or an
                example is a problem.
        """
        check_arguments(self.name, options.extra, self.arguments)
        if options.data is None:
            raise InputError(
                f"jsonl has no bundled problems; set {arg('data=')} to {self.needs_data}"
            )
        self._choose(options.extra)
        template = parse_template(_unescape(options.extra.get("template", _TEMPLATE)))
        numbered, source = _SOURCE.read(options.data, options.split)
        rows = list(numbered)
        answer_field = options.extra.get("answer_field", "answer")
        optional_fields = [
            options.extra.get(f"{kind}_field") for kind in ("group", "image", "messages")
        ]
        _check_together(options)
        prompt_fields = () if options.extra.get("messages_field") else template.fields
        used_fields = [*prompt_fields, answer_field, *filter(None, optional_fields)]
        _check_fields(used_fields, rows, source, options.extra)
        if not isinstance(self._answer, ChoiceAnswer):
            _check_free(rows, source)
        images = RowImages(options, Path(source).parent)
        loaded, skipped = problems_of(
            rows,
            source,
            lambda row, line: self._problem(row, line, template, options.extra, images),
        )
        problems = select(loaded, options)
        turns = _examples(options, template, answer_field, problems)
        return TaskData(
            problems=problems,
            source=source,
            fewshot="".join(f"{prompt}{_gap(prompt)}{answered}\n\n" for prompt, answered in turns),
            num_fewshot=len(turns),
            skipped=skipped,
            turns=tuple(turns),
        )

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return the answer that a text gives, and whether it is one of the right answers."""
        return {"answer": self._answer.verdict(text, json.loads(problem.answer))}

    def _choose(self, extra: Mapping[str, str]) -> None:
        kind, option = _kind(extra)
        if (kind == "regex") != ("pattern" in extra):
            raise InputError(
                f"{option} needs a pattern, such as pattern='answer is (.+)'"
                if kind == "regex"
                else f"{option} does not use a pattern; remove the pattern, or use answer=regex"
            )
        ignore_case = one_of(extra, "ignore_case", ("yes", "no"), "no") == "yes"
        if ignore_case and kind in ("number", "math", "choice"):
            raise InputError(
                f"{option} cannot be used together with ignore_case; remove ignore_case"
            )
        if "choices" in extra and kind != "choice":
            raise InputError(
                f"{option} cannot be used together with choices; remove choices, or use "
                "answer=choice"
            )
        make: Mapping[str, Callable[[], CanonicalAnswer | MathAnswer]] = {
            "text": lambda: TextAnswer(ignore_case=ignore_case),
            "contains": lambda: ContainedAnswer(ignore_case=ignore_case),
            "number": NumberAnswer,
            "math": MathAnswer,
            "choice": lambda: ChoiceAnswer(whole_number(extra, "choices") or 4),
            "regex": lambda: PatternAnswer(extra["pattern"], ignore_case=ignore_case),
        }
        self._answer = make[kind]()

    def _problem(
        self,
        row: dict[str, Any],
        line: int,
        template: Template,
        extra: Mapping[str, str],
        images: RowImages,
    ) -> Problem:
        answers = _answers(row, extra.get("answer_field", "answer"))
        if all(self._answer.canonical(answer) is None for answer in answers):
            raise ValueError(f"answer {answers[0][:40]!r} does not match the answer type")
        problem_id = _id(row, line, extra.get("id_field"))
        group_field, image_field = extra.get("group_field"), extra.get("image_field")
        group = row.get(group_field) if group_field else None
        if chat := extra.get("messages_field"):
            messages, image_values = chat_of(row, chat)
            question = chat_text(messages)
        else:
            messages, question = (), template.fill(row)
            value = row.get(image_field) if image_field else None
            listed = [] if value in (None, "") else [value]
            image_values = value if isinstance(value, list) else listed
        left_out = {chat, image_field} & row.keys()
        return Problem(
            problem_id,
            question,
            json.dumps(answers),
            {"line": line},
            group="" if group is None else str(group),
            images=tuple(
                images.read(image, problem_id, at) for at, image in enumerate(image_values)
            ),
            messages=messages,
            fields={k: v for k, v in row.items() if k not in left_out} if left_out else row,
        )


def _check_together(options: TaskOptions) -> None:
    """Raise InputError for options that cannot be combined."""
    for name in ("image_field", "messages_field"):
        for option in ("num_fewshot", "fewshot_file", "fewshot_data"):
            is_used = getattr(options, option) and options.num_fewshot != 0
            if name in options.extra and is_used:
                raise InputError(
                    f"{arg(option)} cannot be used together with {name}; remove one of the two"
                )
    for name in ("image_field", "template"):
        if name in options.extra and "messages_field" in options.extra:
            raise InputError(
                f"{name} cannot be used together with messages_field; remove one of the two"
            )


def _kind(extra: Mapping[str, str]) -> tuple[str, str]:
    """Return the requested answer type, and the option that set it, for messages."""
    if "metric" not in extra:
        kind = one_of(extra, "answer", ANSWERS, "regex" if "pattern" in extra else "text")
        return kind, f"answer={kind}"
    if "answer" in extra:
        raise InputError(
            "answer and metric cannot be used together; remove one of the two; to resume a run, "
            "use the same argument as before"
        )
    metric = one_of(extra, "metric", tuple(METRICS), "exact")
    return METRICS[metric], f"metric {metric}"


def _unescape(text: str) -> str:
    # A newline or a tab is hard to type in a shell.
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def _check_fields(
    fields: Sequence[str],
    rows: Sequence[tuple[int, Mapping[str, Any]]],
    source: str,
    extra: Mapping[str, str],
) -> None:
    """Raise DataError if there is no row, or for a field that no row has.

    Args:
        fields: The names of the fields that the task uses.
        rows: The rows with their line numbers.
        source: The file, for the message.
        extra: The arguments of the task.
    """
    if not rows:
        raise DataError(f"{source} has no rows; write a question and its answer in each row")
    field_names = {name for _, row in rows for name in row}
    for name in fields:
        if name not in field_names:
            have = (
                did_you_mean(name, field_names)
                or f"; the rows have {', '.join(sorted(field_names)[:20])}"
            )
            how = _name_fields(field_names, extra) if name in ("question", "answer") else ""
            raise DataError(f"no row of {source} has a field {name!r}{have}{how}")


def _name_fields(field_names: Collection[str], extra: Mapping[str, str]) -> str:
    """Return how to name the missing fields of the question and the answer, as far as names tell.

    Args:
        field_names: The names of the fields that rows have.
        extra: The arguments of the task, which the user has set already.
    """
    question, answer = (
        next((name for name in names if name in field_names), "FIELD")
        for names in (_QUESTIONS, _ANSWERS)
    )
    arguments = []
    if "question" not in field_names and not {"template", "messages_field"} & extra.keys():
        template = _TEMPLATE.replace("question", question).replace("\n", r"\n")
        arguments.append(f"-T template='{template}'")
    if "answer" not in field_names and "answer_field" not in extra:
        arguments.append(f"-T answer_field={answer}")
    return f"; set the fields with {' '.join(arguments)}" if arguments else ""


def _check_free(rows: Sequence[tuple[int, Mapping[str, Any]]], source: str) -> None:
    """Raise DataError for multiple choice, which is not scored by sampled text."""
    for line, row in rows:
        if isinstance(row.get("choices"), list):
            raise DataError(
                f"{source}, line {line} has choices, but jsonl does not score choices; write a "
                "task that scores choices (see examples/own_task_package), or rename the field "
                "to sample free answers"
            )


def _answers(row: Mapping[str, Any], name: str) -> list[str]:
    value = row.get(name)
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{name} is an empty list")
        return [field_text({name: answer}, name) for answer in value]
    return [field_text(row, name)]


def _id(row: Mapping[str, Any], line: int, name: str | None) -> str:
    value = row.get(name or "id")
    if value is None and name is None:
        return f"line-{line}"
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"{name or 'id'} is neither text nor an integer")
    return field_text(row, name or "id")


def _examples(
    options: TaskOptions, template: Template, answer_field: str, problems: Sequence[Problem]
) -> list[Turn]:
    if options.fewshot_file is None and options.fewshot_data is None:
        if options.num_fewshot:
            raise InputError(
                f"{arg('num_fewshot')} needs examples; pass {arg('fewshot_file')} or "
                f"{arg('fewshot_data')}"
            )
        return []

    def make(row: dict[str, Any]) -> Turn:
        target = field_text(row, "target") if "target" in row else _answers(row, answer_field)[0]
        return template.fill(row), target

    return pick_turns(options, problems, None, make, _SOURCE.train)


def _gap(prompt: str) -> str:
    return "" if prompt[-1:].isspace() else " "
