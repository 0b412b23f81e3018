r"""MATH and its subset MATH-500: competition problems whose answers are expressions.

Data: https://github.com/hendrycks/math (Hendrycks et al., 2021; MIT), on the hub
EleutherAI/hendrycks_math; and HuggingFaceH4/MATH-500, the 500 problems of Lightman et al. (2023).
One row of each:

    {"problem": "What is $1+1$?", "level": "Level 1", "type": "Prealgebra",
     "solution": "It is $\\boxed{2}$."}
    {"problem": "What is $1+1$?", "solution": "It is $\\boxed{2}$.", "answer": "2",
     "subject": "Prealgebra", "level": 1, "unique_id": "test/prealgebra/1.json"}

`math` has the prompt of Minerva (Lewkowycz et al., 2022) and lm-eval's minerva_math, four solved
examples and one solution:

    Problem:\n{problem}\n\nSolution: {solution}\n\n  ...  Problem:\n{problem}\n\nSolution:

`math500` has no examples and asks for a boxed answer, as in the evaluations of DeepSeek-R1 and
Qwen.

The filter `minerva` follows appendices D.1 and G of Lewkowycz et al. (2022), Solving Quantitative
Reasoning Problems with Language Models, in the version of lm-eval's minerva_math: the sentence that
ends a solution, and the canonical form of its answer, a text. lm-eval compares two forms with
sympy; here math-verify compares them. The four bundled examples were written for treegen. Minerva's
own are in its paper's appendix D.2 and in lm-eval. Use them as a few-shot file, one
{"problem": ..., "solution": ...} per line.

The last \boxed{} of a text is the answer, compared by the rule of MATH's authors (Hendrycks et al.,
2021, Measuring Mathematical Problem Solving With the MATH Dataset). Their rule compares texts after
removing what does not matter: spaces, units, \left and \right, and shorthand. Every function is
total.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from treegen.errors import DataError
from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.evals.task import TaskDefaults
from treegen.evals.verdict import AnswerType, Verdict
from treegen.tasks.answers.canonical import MAX_ANSWER, MAX_TEXT
from treegen.tasks.answers.maths import MathAnswer, without_dollars
from treegen.tasks.common.files import RowNumber, Rows, column, optional, read_data
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.common.text_task import REASONING, TextTask, greedy

_SUBJECTS: Final = (
    "algebra",
    "counting_and_probability",
    "geometry",
    "intermediate_algebra",
    "number_theory",
    "prealgebra",
    "precalculus",
)


class MathSource(Source):
    """The places from which rows can come, including the authors' folders."""

    def from_files(self, data: str, split: str | None, default: str) -> tuple[Rows, str]:
        """Return the rows of a folder of subjects, or of a file, and its path.

        Args:
            data: Path of a file, or of a folder with a file or folder for each split.
            split: The split to read from a folder; None for `default`.
            default: The split to read from a folder if `split` is None.
        """
        folder = Path(data) / (split or default)
        if folder.is_dir():
            return _folder_rows(folder), str(folder)
        return super().from_files(data, split, default)


_BUNDLED: Final = "math_sample.jsonl"
_HUB: Final = HubTable("EleutherAI/hendrycks_math", ("test", "train"), _SUBJECTS)
MATH: Final = MathSource(task="math", bundled=_BUNDLED, hub=_HUB)
MATH_500: Final = MathSource(
    task="math500", bundled=_BUNDLED, hub=HubTable("HuggingFaceH4/MATH-500")
)


def final_answer(row: dict[str, Any]) -> str:
    r"""Return a row's answer: its own column, otherwise the last box of its solution.

    Raises:
        ValueError: The row has no answer.
    """
    if (answer := optional(row, ("answer",))) is not None:
        return without_dollars(answer)
    boxed = extract_boxed(column(row, ("solution",)))
    if not boxed or not boxed.strip():
        raise ValueError("the row has no answer, and its solution has no boxed answer")
    return boxed


def _folder_rows(folder: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the JSON files of a folder of subjects, in the order of subjects and numbers."""
    paths = sorted(folder.glob("*/*.json"), key=lambda path: (path.parent.name, _number(path)))
    if not paths:
        raise DataError(
            f"{folder} has no file such as algebra/1.json; pass the folder that contains train/ "
            "and test/"
        )
    for number, path in enumerate(paths, start=1):
        content = read_data(path)
        try:
            row = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{path} is not JSON: {error}; download the file again") from None
        if not isinstance(row, dict):
            raise DataError(f"{path} is not a JSON object; download the file again")
        unique_id = f"{folder.name}/{path.parent.name}/{path.name}"
        yield RowNumber(number, path, 1), {"unique_id": unique_id, **row}


def _number(path: Path) -> tuple[int, str]:
    digits = re.fullmatch(r"[0-9]{1,9}", path.stem)
    return (int(path.stem) if digits else 0, path.stem)


SENTENCE: Final = "Final Answer: The final answer is ${answer}$. I hope it is correct."

_BEGIN: Final = "Final Answer: The final answer is"
_LAST: Final = "I hope it is correct."
_END: Final = re.compile(r". I hope it is correct.")

_SUBSTITUTED: Final = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    ("\\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (",\\text{and}", ","),
    ("\\text{and}", ","),
    ("\\text{m}", "\\text{}"),
)
# Units and marks that are removed, in this order.
_WORDS: Final = r"""
square ways integers dollars mph inches ft hours km units \ldots sue points feet minutes digits
cents degrees cm gm pounds meters meals edges students childrentickets multiples \text{s} \text{.}
"""
_MARKS: Final = r"""\text{} \mathrm{th} ^\circ ^{\circ} \; ,\! {,} " \dots"""
_UNITS: Final = (
    *_WORDS.split(),
    *("\\text{\ns}", "\\text{}^2", "\\text{}^3", "\\text{\n}"),
    *_MARKS.split(),
)
_COMMAND: Final = re.compile(r"(\\[a-zA-Z]+)")


def minerva_answer(text: str) -> str | None:
    """Return the answer in the first sentence of the form SENTENCE; None if there is none."""
    # The sentence is on one line. The text may have been cut off right before the last words.
    for line in f"{text}{_LAST}".split("\n"):
        at = line.find(_BEGIN)
        if at >= 0 and (end := _END.search(line, at + len(_BEGIN))):
            return line[at + len(_BEGIN) : end.start()].strip()
    return None


def minerva_form(answer: str) -> str:
    """Return the canonical form of an answer."""
    form = answer.rpartition("=")[2]
    for unit in _UNITS:
        if unit.isalpha():
            form = re.sub(rf"(?<!\\)\b{unit}\b", "", form)
    for old, new in _SUBSTITUTED:
        form = form.replace(old, new)
    for unit in _UNITS:
        if unit.isalpha():
            # Commands, such as \left, keep their letters.
            parts = _COMMAND.split(form)
            parts[::2] = [part.replace(unit, "") for part in parts[::2]]
            form = "".join(parts)
        else:
            form = form.replace(unit, "")
    form = re.sub(r"(.*?)(\$)(.*?)(\$)(.*)", "$\\3$", form)
    for command in ("text", "textbf", "overline"):
        form = re.sub(rf"\\{command}\{{(.*?)\}}", r"\1", form)
    form = re.sub(r"\\boxed\{(.*)\}", r"\1", form)
    # Write \frac12 as \frac{1}{2}, \sqrt2 as \sqrt{2}, and \sqrt[3]2 as \sqrt[3]{2}.
    form = re.sub(r"(frac)([^{])(.)", r"frac{\2}{\3}", form)
    form = re.sub(r"(sqrt)(\[[^\]]*\])(\w)", r"\1\2{\3}", form)
    form = re.sub(r"(sqrt)(?!\[)([^{])", r"sqrt{\2}", form)
    form = form.replace("$", "")
    return form.replace(",", "") if re.fullmatch(r"-?\d{1,3}(,\d{3})+", form) else form


class MinervaAnswer(MathAnswer):
    """The answer in Minerva's sentence, in Minerva's form, compared as mathematics."""

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        """Return the answer in the sentence, and whether it equals one of the references."""
        answer = minerva_answer(text[-MAX_TEXT:])
        form = minerva_form(answer) if answer and len(answer) <= MAX_ANSWER else ""
        if not form.strip():
            return Verdict(None, False)
        reference_forms = [minerva_form(reference) for reference in references]
        return Verdict(
            form, form in reference_forms or super().verdict(f"${form}$", reference_forms).correct
        )


_BOXED: Final = "Please reason step by step, and put your final answer within \\boxed{}."


class Competition(TextTask):
    """Asks for a boxed answer; reads it with math-verify and by the rule of MATH's authors."""

    filters: tuple[str, ...] = ("math-verify", "hendrycks")

    def __init__(self) -> None:
        """Create the answer type."""
        self._math = MathAnswer()

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """Answer types by filter: math-verify groups equal answers, the other compares texts."""
        return {"math-verify": self._math}

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the problem of a row."""
        level = re.search(r"[1-5]", optional(row, ("level",)) or "")
        return Problem(
            id=optional(row, ("unique_id", "id")) or f"math-{line - 1}",
            question=column(row, ("problem", "question")),
            answer=final_answer(row),
            metadata={
                "line": line,
                "subject": optional(row, ("subject", "type")) or "",
                "level": int(level[0]) if level else None,
                "solution": optional(row, ("solution",)) or "",
            },
        )

    def ask_question(self, question: str) -> str:
        """Return the prompt that asks for a boxed answer."""
        return f"{question}\n{_BOXED}"

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        references = [problem.answer]
        return {
            "math-verify": self._math.verdict(text, references),
            "hendrycks": hendrycks_verdict(text, references),
        }


class Math(Competition):
    """MATH with Minerva's prompt: 4 examples, 1 sample, temperature 0.

    Three filters read the same texts: `math-verify`; `minerva`, the answer in Minerva's sentence;
    and `hendrycks`, the rule of MATH's authors.
    """

    name = "math"
    source = MATH
    own_examples = "math_fewshot.jsonl"
    filters = ("math-verify", "minerva", "hendrycks")
    groups = ("subject", "level")
    defaults: Final = greedy(max_tokens=1024, stop=("Problem:",), num_fewshot=4)

    def __init__(self) -> None:
        """Create the answer types."""
        super().__init__()
        self._minerva = MinervaAnswer()

    @property
    def answer_types(self) -> dict[str, AnswerType]:
        """Answer types by filter: both filters that compare mathematics group equal answers."""
        return {**super().answer_types, "minerva": self._minerva}

    def make_example(self, row: dict[str, Any], *, is_drawn: bool) -> Turn:
        """Return a problem and its solution, which ends with the sentence."""
        problem, solution = column(row, ("problem", "question")), column(row, ("solution",)).strip()
        if minerva_answer(solution) is None or not solution.endswith("correct."):
            solution = f"{solution}\n{SENTENCE.format(answer=final_answer(row))}"
        return problem, solution

    def ask_question(self, question: str) -> str:
        """Return the problem, up to where its solution begins."""
        return f"Problem:\n{question}\n\nSolution:"

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return a verdict for each filter."""
        return {
            **super().score(problem, text),
            "minerva": self._minerva.verdict(text, [problem.answer]),
        }


class Math500(Competition):
    """MATH-500 in the form used for reasoning models: no examples, a boxed answer."""

    name = "math500"
    source = MATH_500
    groups = ("subject", "level")
    defaults: Final = TaskDefaults(sampling=REASONING, num_samples=4, num_fewshot=0)


# Replacements in this order; each is applied everywhere before the next.
_REPLACED: Final = (
    ("\n", ""),
    ("\\!", ""),
    ("\\\\", "\\"),
    ("tfrac", "frac"),
    ("dfrac", "frac"),
    ("\\left", ""),
    ("\\right", ""),
    ("^{\\circ}", ""),
    ("^\\circ", ""),
    ("\\$", ""),
)


def extract_boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} of a text; None without a closed one.

    As in the original, in a text with `\boxed ` the answer is the text from the last of these up to
    the next dollar sign.
    """
    if "\\boxed " in text:
        return text.rpartition("\\boxed ")[2].partition("$")[0]
    start = text.rfind("\\boxed")
    if start < 0 or not text.startswith("\\boxed{", start):
        return None
    depth = 0
    for brace in re.finditer(r"[{}]", text[start:]):
        depth += 1 if brace[0] == "{" else -1
        if not depth:
            return text[start + len("\\boxed{") : start + brace.start()]
    return None


def extract_stated(text: str) -> str:
    """Return the answer that lm-eval's task aime compares.

    It is the content of the last box, otherwise the text between the first and the last dollar
    sign, otherwise the whole text.
    """
    boxed = extract_boxed(text)
    if boxed is not None:
        return boxed
    first, last = text.find("$"), text.rfind("$")
    return text[first + 1 : last] if first < last else text


def hendrycks_verdict(text: str, references: Sequence[str]) -> Verdict:
    """Return the verdict on the answer in a text, compared by the rule of MATH's authors."""
    answer = extract_stated(text[-MAX_TEXT:])
    if not answer.strip() or len(answer) > MAX_ANSWER:
        return Verdict(None, False)
    form = hendrycks_form(answer)
    right = any(equivalent(answer, reference) for reference in references)
    return Verdict((answer if form is None else form) or answer, right)


def equivalent(first: str, second: str) -> bool:
    """Return whether two answers have equal forms; texts without a form are compared unchanged."""
    one, other = hendrycks_form(first), hendrycks_form(second)
    return first == second if one is None or other is None else one == other


def hendrycks_form(answer: str) -> str | None:
    """Return the canonical form of an answer; None where the original rule fails."""
    for old, new in _REPLACED:
        answer = answer.replace(old, new)
    # In MATH, "\text{ " begins a unit on the right.
    answer, unit, tail = answer.partition("\\text{ ")
    if unit and "\\text{ " in tail:
        return None
    answer = answer.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    if not answer:
        return answer
    if answer[0] == ".":
        answer = "0" + answer
    sides = answer.split("=")
    if len(sides) == 2 and len(sides[0]) <= 2:
        answer = sides[1]
    first, *roots = answer.split("\\sqrt")
    if not all(roots):
        return None  # a root without an operand
    roots = [root if root[0] == "{" else f"{{{root[0]}}}{root[1:]}" for root in roots]
    fractions = _brace_fractions("\\sqrt".join([first, *roots]).replace(" ", ""))
    if fractions is None:
        return None
    return _as_fraction("\\frac{1}{2}" if fractions == "0.5" else fractions)


def _brace_fractions(answer: str) -> str | None:
    r"""Return an answer with \frac12 written as \frac{1}{2}; None if it ends with \frac."""
    first, *pieces = answer.split("\\frac")
    parts = [first]
    for part in pieces:
        if not part:
            return None
        if part[0] != "{":
            if len(part) < 2:
                return answer
            top, bottom = part[0], part[1]
            part = f"{{{top}}}{part[1:]}" if bottom == "{" else f"{{{top}}}{{{bottom}}}{part[2:]}"
        parts.append(part)
    return "\\frac".join(parts)


def _as_fraction(answer: str) -> str | None:
    r"""Return 3/4 as \frac{3}{4}, and most other answers unchanged.

    Returns None if int() fails for a side, as in the original: x/2 has no form.
    """
    sides = answer.split("/")
    if len(sides) != 2:
        return answer
    try:
        top, bottom = int(sides[0]), int(sides[1])
    except ValueError:
        return None
    return f"\\frac{{{top}}}{{{bottom}}}" if answer == f"{top}/{bottom}" else answer
