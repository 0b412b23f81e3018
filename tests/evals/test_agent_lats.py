"""LATS on an agent: it judges states, learns from failures, and acts by what it has learned."""

from pathlib import Path
from typing import Any

import pytest
from agent_runs import Policy, load_job, run_job, walker

from treegen.evals.problem import Problem
from treegen.evals.search.methods import _read_score
from treegen.runs import RecordFile

LESSON = "Carry on to the goal."


def learner(kinds: list[str]) -> Policy:
    """A policy that gives up half of the time, until it has read the lesson."""
    walk = walker(0.0)

    def reply(problem: Problem, context: str, seed: int) -> str:
        if "say what went wrong" in context:
            kinds.append("lesson")
            assert context.count("<|im_start|>user") == 1 and problem.question in context
            return f" {LESSON}\n"
        if "from 0 to 10" in context:
            kinds.append("judgement")
            return "I say 7." if "Answer: I give up" in context else "0"
        knows = f"Lessons of earlier attempts:\n{LESSON}" in context
        return walk(problem, context, seed) if knows or seed % 2 else "I give up."

    return reply


def search(path: Path, kinds: list[str], **choices: Any) -> list[dict[str, Any]]:
    job = load_job(
        "text-world",
        "lats",
        extra={"problems": "3", "level": "easy"},
        expand=4,
        depth=20,
        iterations=6,
        temperature=0.7,
        budget={"actions": 200},
        **choices,
    )
    run_job(job, learner(kinds), path)
    return list(RecordFile(path / "trees.jsonl", writable=False).records())


def test_lessons_are_learned_once_and_lead_to_the_goal(tmp_path: Path) -> None:
    kinds: list[str] = []
    records = search(tmp_path / "run", kinds)
    assert all(record["solved"] for record in records)
    texts = [[node["text"] for node in record["nodes"]] for record in records]
    lessons = [[text for text in of if "Lessons of earlier attempts" in text] for of in texts]
    assert any(lessons) and "lesson" in kinds and "judgement" in kinds
    assert all(text.count(LESSON) == 1 for of in lessons for text in of)
    assert search(tmp_path / "again", [])[0]["nodes"] == records[0]["nodes"]


def test_without_weight_the_model_judges_nothing(tmp_path: Path) -> None:
    kinds: list[str] = []
    search(tmp_path / "run", kinds, arguments={"weight": "0"})
    assert "judgement" not in kinds


@pytest.mark.parametrize(
    ("answer", "value"), [("8", 0.8), ("It is 3.5 of 10", 0.35), ("99", 1.0), ("none", 0.5)]
)
def test_judgements_are_read(answer: str, value: float) -> None:
    assert _read_score(answer) == value
