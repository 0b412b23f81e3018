"""SimpleQA: its data, its prompt, and its scores from a judge's letters."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import treegen
from treegen import LLM, InputError
from treegen.evals.judging.judgement_files import FOLDER
from treegen.evals.judging.published_scores import simpleqa_scores
from treegen.evals.judging.rubric import load_rubric
from treegen.evals.task import TaskOptions
from treegen.prompts.tree import prompts_of
from treegen.tasks import get_task

ROWS: list[dict[str, Any]] = [
    {
        "metadata": "{'topic': 'Art', 'answer_type': 'Person', 'urls': ['https://x.org/a,b']}",
        "problem": "Who painted it?",
        "answer": "Ada  Lovelace",
    },
    {"metadata": '{"topic": "Music", "answer_type": "Date"}', "problem": "When?", "answer": "1842"},
    {"metadata": "__import__('os').system('true')", "problem": "Where?", "answer": "Rome"},
    {"metadata": "{'topic': 'Art'}", "problem": "", "answer": "nothing"},
    {"metadata": "{[]: 1}", "problem": "Who?", "answer": "Eve"},
]


@pytest.fixture(name="table")
def _table(tmp_path: Path) -> Path:
    """A file as it is published."""
    path = tmp_path / "simple_qa_test_set.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["metadata", "problem", "answer"])
        writer.writeheader()
        writer.writerows(ROWS)
    return path


@pytest.mark.parametrize("whole", [False, True])
def test_the_published_table_is_read(table: Path, whole: bool) -> None:
    task = get_task("simpleqa")
    data = task.load(TaskOptions(data=str(table.parent if whole else table)))
    assert [(p.id, p.question, p.answer) for p in data.problems] == [
        ("simpleqa-1", "Who painted it?", "Ada  Lovelace"),
        ("simpleqa-2", "When?", "1842"),
        ("simpleqa-3", "Where?", "Rome"),
        ("simpleqa-5", "Who?", "Eve"),
    ]
    assert [p.metadata.get("topic") for p in data.problems] == ["Art", "Music", None, None]
    assert [each.line for each in data.skipped] == [5]
    prompts = [
        "".join(str(node.content) for node in p.path) for p in prompts_of(task.tree(data, 1))
    ]
    assert prompts == ["Who painted it?", "When?", "Where?", "Who?"]
    verdicts = [
        task.score(data.problems[0], text)["contains"].correct
        for text in ("It was ada lovelace.", "Ada", "")
    ]
    assert verdicts == [True, False, False]
    with pytest.raises(InputError, match="does not support few-shot examples"):
        task.load(TaskOptions(data=str(table), num_fewshot=1))


def test_bundled_questions_say_what_they_are() -> None:
    data = get_task("simpleqa").load(TaskOptions())
    assert len(data.problems) == 10 and data.label == "bundled problems" and not data.skipped


def test_its_judge_gives_the_scores_that_are_published(tmp_path: Path) -> None:
    """The first A, B or C that a judge happens to write decides, so any model gives grades."""
    llm = LLM("demo", device="cpu", memory="32MiB")
    run = treegen.evaluate(
        "simpleqa", llm, output=tmp_path / "run", limit=5, max_tokens=4, progress=False
    )
    found = treegen.judge(run, judge=llm, max_tokens=16, temperature=2.0, progress=False)
    (summary,) = found.summaries
    settings = summary.judged[0].judging.settings
    assert (settings.rubric.name, settings.verdicts, settings.wordings) == (
        "simpleqa",
        "samples",
        3,
    )
    (file,) = (run.path / FOLDER).glob("*/judgements.jsonl")
    texts = [json.loads(line)["text"] for line in file.read_text().splitlines()]
    assert len(texts) == 15 and len({settings.rubric.read(text) for text in texts}) > 1
    ((name, scores),) = summary.more["simpleqa"].items()
    assert name == file.parent.name and scores == simpleqa_scores(texts)
    assert summary.mean is not None
    assert summary.mean.value == pytest.approx(scores["is_correct"])
    (table,) = [table for table in summary.tables if table.title == "SimpleQA's scores"]
    assert table.columns[1:] == (
        "correct",
        "incorrect",
        "not attempted",
        "given attempted",
        "accuracy given attempted",
        "f1",
    )
    assert table.rows[0][1:] == tuple(scores.values())


def test_the_rubric_is_read_as_its_script_reads() -> None:
    rubric = load_rubric("simpleqa")
    assert [rubric.read(text) for text in ("A", "B.", "Grade: C", "none", "CORRECT")] == [
        "A",
        "B",
        "C",
        "C",
        "C",
    ]
