"""GSM8K's problems and examples: their sources, and how rows are read.

The eight bundled examples were written for treegen, in the style of the eight examples of
chain-of-thought papers. To compare scores with published ones, use the published examples: a
few-shot file with one {"question": ..., "target": "... The answer is N."} per line.
"""

import re
from typing import Any, Final

from treegen.evals.chat import Turn
from treegen.evals.problem import Problem
from treegen.tasks.common.answers import canonical_number
from treegen.tasks.common.jsonl import text_field
from treegen.tasks.common.problems import row_id
from treegen.tasks.common.sources import HubTable, Source

SOURCE: Final = Source(
    task="gsm8k",
    bundled="gsm8k_sample.jsonl",
    hub=HubTable("openai/gsm8k", ("test", "train"), ("main",)),
)
EXAMPLES: Final = "gsm8k_fewshot.jsonl"

# Notes for a calculator, such as "<<48/2=24>>", which the data's authors advise to remove.
_ANNOTATION: Final = re.compile(r"<<[^>]*>>")


def reasoning_and_number(answer: str) -> tuple[str, str]:
    """Split a reference answer at its last "####", and remove its calculator notes.

    An answer without "####" is a number as a whole.
    """
    reasoning, _, number = _ANNOTATION.sub("", answer).rpartition("####")
    return reasoning.rstrip(), number.strip()


def read_problem(row: dict[str, Any], line: int) -> Problem:
    """Return the problem of a row.

    Raises:
        ValueError: The row is unusable; the message has the reason.
    """
    question = text_field(row, "question")
    answer = text_field(row, "answer")
    _, number = reasoning_and_number(answer)
    if canonical_number(number) is None:
        raise ValueError("answer must end in '#### NUMBER'")
    return Problem(row_id(row, line, "gsm8k"), question, number, {"line": line, "solution": answer})


def read_example(row: dict[str, Any]) -> Turn:
    """Return the question and the answer of a solved example.

    Raises:
        ValueError: The row is unusable; the message has the reason.
    """
    question = text_field(row, "question")
    if "target" in row:
        return question, text_field(row, "target")
    answer = text_field(row, "answer")
    reasoning, number = reasoning_and_number(answer)
    if "####" not in answer:
        return question, number
    # strict-match searches for this sentence, so the model must learn to copy it.
    return question, f"{reasoning}\nThe answer is {number}.".lstrip("\n")


def read_drawn(row: dict[str, Any]) -> Turn:
    """Return an example from a split, as `read_example` does."""
    question, target = read_example(row)
    if "\n\n" in target:
        raise ValueError("a blank line in an example would teach the model to write a stop string")
    return question, target


def num_steps(problem: Problem) -> int:
    """Return the number of steps of the reference solution: its lines before the answer."""
    reasoning, _ = reasoning_and_number(problem.metadata.get("solution", ""))
    return sum(bool(line.strip()) for line in reasoning.splitlines())
