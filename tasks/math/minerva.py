"""Minerva's rule for MATH: the sentence that ends a solution, and the canonical form of its answer.

The four bundled examples were written for treegen. Minerva's own are in its paper's appendix D.2
and in lm-eval. Use them as a few-shot file, one {"problem": ..., "solution": ...} per line.

Lewkowycz et al. (2022), Solving Quantitative Reasoning Problems with Language Models, appendices
D.1 and G, in the version of lm-eval's minerva_math. The form is a text. lm-eval compares two forms
with sympy; here math-verify compares them.
"""

import re
from collections.abc import Sequence
from typing import Any, Final

from treegen.evals.chat import Turn
from treegen.evals.verdict import Verdict
from treegen.tasks.answers.canonical import MAX_ANSWER, MAX_TEXT
from treegen.tasks.answers.maths import MathAnswer
from treegen.tasks.common.files import column
from treegen.tasks.math.data import final_answer

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


def read_example(row: dict[str, Any]) -> Turn:
    """Return a problem and its solution, which ends with the sentence.

    Raises:
        ValueError: The row is unusable; the message has the reason.
    """
    problem, solution = column(row, ("problem", "question")), column(row, ("solution",)).strip()
    if minerva_answer(solution) is None or not solution.endswith("correct."):
        solution = f"{solution}\n{SENTENCE.format(answer=final_answer(row))}"
    return problem, solution


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
        wanted = [minerva_form(reference) for reference in references]
        return Verdict(form, form in wanted or super().verdict(f"${form}$", wanted).correct)
