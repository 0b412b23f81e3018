"""Runs of ten tasks with good data, prompts and samples, on which the audit must find nothing.

The samples state answers as models do, right ones and wrong ones, over the real problems. They were
read by hand: the verdict on each of them is the right one.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job
from treegen.evals.problem import Problem
from treegen.report.audit.answers import references_of
from treegen.report.audit.audit import audit_run
from treegen.runs import RunDir

_THOUGHT = (
    "First we write down what is known, and then add up the parts one after the other.",
    "Let us go step by step. There are 3 parts of 12, and 2 more that were left over.",
    "To find it, look at each case in turn. The second case is the one that matters here.",
)
_NUMBERS = (
    "{t} So the answer is {a}.",
    "{t}\nThe answer is {a}.",
    "{t}\n#### {a}",
    "{t} \\boxed{{{a}}}",
    "{t}\n\n<answer>{a}</answer>",
    '```json\n{{"reasoning": "{t}", "answer": {a}}}\n```',
    "Wir addieren alle Teile. Die Antwort ist {a}.",
    "La respuesta correcta es {a}",
    "{t}\n\n**{a} apples**",
    "{t}\n\nThere are {a} apples in the box.",
    "{t}\n\n### Final Answer\n\n**Answer:** ${a}",
    "{t} That makes {a} km in all.",
)
_LETTERS = (
    "{t}\nAnswer: {a}",
    "{t} The answer is ({a}).",
    "**Answer:** {a}\n\n{t}",
    "{a}",
    "{t}\nANSWER: {a}",
    "The correct answer is {a}. {t}",
    "{a}) because of that. {t}",
)
_BOXES = ("{t} \\boxed{{{a}}}", "Die Antwort ist $\\boxed{{{a}}}$.", "{t}\n\\[\\boxed{{{a}}}\\]")
_FORMULAS = (
    "{t} Hence \\boxed{{{a}}}.",
    "{t}\n\n$$\\boxed{{{a}}}$$",
    "Also ist die Antwort $\\boxed{{{a}}}$.",
    "\u6240\u4ee5\u7b54\u6848\u662f $\\boxed{{{a}}}$\u3002",
    "**Final answer**\n\n\\[\n\\boxed{{{a}}}\n\\]\n\nThis completes the solution.",
)

Writer = Callable[[random.Random, Problem], str]


def _stating(forms: tuple[str, ...], wrong: Callable[[random.Random, str], str]) -> Writer:
    """Return a writer of samples, of which every third is wrong."""

    def write(draw: random.Random, problem: Problem) -> str:
        answer = references_of(problem.answer)[0]
        if draw.random() < 1 / 3:
            answer = wrong(draw, answer)
        return draw.choice(forms).format(t=draw.choice(_THOUGHT), a=answer)

    return write


def _other_number(draw: random.Random, answer: str) -> str:
    return str(int(answer.replace(",", "")) + draw.randint(1, 9))


def _other_letter(draw: random.Random, answer: str) -> str:
    return draw.choice("ABCD".replace(answer, ""))


def _other_formula(draw: random.Random, answer: str) -> str:
    others = (f"{answer}+{draw.randint(1, 9)}", f"-{answer}", r"\text{no solution}", "(0, 1)", "x")
    return draw.choice(others)


# The script of simple-evals, which GPQA's first filter is, reads this form only.
_marked_letter = _stating(_LETTERS[:1], _other_letter)
_number = _stating(_NUMBERS, _other_number)
_letter = _stating(_LETTERS, _other_letter)
_formula = _stating(_FORMULAS, _other_formula)


def _say(draw: random.Random, problem: Problem) -> str:
    said = references_of(problem.answer)
    return f"It is {said[0] if said else 'so'}." if draw.random() < 0.7 else "It is something else."


def _shared(name: str) -> str | None:
    folder = os.environ.get("TREEGEN_TEST_DATA")
    return str(Path(folder) / name) if folder else None


@pytest.mark.parametrize(
    ("task", "data", "write", "answers"),
    [
        ("gsm8k", None, _number, "number"),
        ("gsm8k", _shared("gsm8k"), _number, "number"),
        ("mmlu-generate", _shared("mmlu"), _letter, "choice"),
        ("gpqa", None, _marked_letter, "choice"),
        ("aime", None, _stating(_BOXES, _other_number), "mathematics"),
        ("math", None, _formula, "mathematics"),
        ("math500", None, _formula, "mathematics"),
        ("hmmt", None, _formula, "mathematics"),
        ("simpleqa", None, _say, "none"),
        ("needle", None, _say, "none"),
        ("humaneval", None, lambda draw, problem: "    return None\n", "code"),
    ],
)
def test_clean_runs_have_no_severe_findings(
    task: str, data: str | None, write: Writer, answers: str, tmp_path: Path
) -> None:
    if data is None and task == "mmlu-generate":
        pytest.skip("needs TREEGEN_TEST_DATA")
    settings = {"task": task, "data": data, "limit": 60, "num_samples": 2, "model": "made-up"}
    job = load_job(resolve_eval_settings({k: v for k, v in settings.items() if v is not None}))
    draw = random.Random(task)
    with RunDir.create(
        tmp_path / "run", run_settings(job, dtype="float32", fingerprint="0")
    ) as run:
        for problem in job.data.problems:
            for index in range(2):
                text = write(draw, problem)
                run.append(
                    {
                        "problem_id": problem.id,
                        "sample_index": index,
                        "text": text,
                        "num_tokens": len(text) // 4,
                        "finish_reason": "stop",
                        "prompt_tokens": 100,
                    }
                )
    audit = audit_run(tmp_path / "run")
    assert audit.answers == answers
    severe = {finding.kind for finding in audit.findings if finding.severity != "low"}
    assert not severe, str(audit)
