"""GSM8K's problems and examples: where they are read from, and what a row of them says.

The eight bundled examples were written for treegen, in the style of the eight that chain-of-thought
papers use. Scores that are to be compared with published ones need the published examples. Give
them as a few-shot file, one {"question": ..., "target": "... The answer is N."} a line.
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

# Notes for a calculator, such as "<<48/2=24>>". The data's authors say to remove them from prompts.
_ANNOTATION: Final = re.compile(r"<<[^>]*>>")


def reasoning_and_number(answer: str) -> tuple[str, str]:
    """Split a reference answer at its last "####", without its calculator notes.

    An answer without "####" is a number as a whole.
    """
    reasoning, _, number = _ANNOTATION.sub("", answer).rpartition("####")
    return reasoning.rstrip(), number.strip()


def read_problem(row: dict[str, Any], line: int) -> Problem:
    """Return the problem of a row.

    Raises:
        ValueError: the row has none, for the reason given.
    """
    question = text_field(row, "question")
    answer = text_field(row, "answer")
    _, number = reasoning_and_number(answer)
    if canonical_number(number) is None:
        raise ValueError("answer must end in '#### NUMBER'")
    return Problem(row_id(row, line, "gsm8k"), question, number, {"line": line, "solution": answer})


def read_example(row: dict[str, Any]) -> Turn:
    """Return a question and the answer that the model is shown.

    Raises:
        ValueError: the row has none, for the reason given.
    """
    question = text_field(row, "question")
    if "target" in row:
        return question, text_field(row, "target")
    answer = text_field(row, "answer")
    reasoning, number = reasoning_and_number(answer)
    if "####" not in answer:
        return question, number
    # strict-match looks for this sentence, so the model is to copy it.
    return question, f"{reasoning}\nThe answer is {number}.".lstrip("\n")


def read_drawn(row: dict[str, Any]) -> Turn:
    """Return an example of a split, as `read_example` does."""
    question, target = read_example(row)
    if "\n\n" in target:
        raise ValueError("a blank line in an example would teach the model to write a stop string")
    return question, target


def num_steps(problem: Problem) -> int:
    """Return how many lines the reference solution has before its answer; each is a step."""
    reasoning, _ = reasoning_and_number(problem.metadata.get("solution", ""))
    return sum(bool(line.strip()) for line in reasoning.splitlines())
