"""RULER's needle tests: prompts, needles, lengths and string_match_all."""

import hashlib
import re
from pathlib import Path

import pytest

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.registry import get_task, list_tasks
from treegen.evals.statistics.metrics import ReportOptions
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.prompts.tree import prompts_of
from treegen.tasks.needle.ruler import ADJECTIVES, NOUNS

NAMES = [info.name for info in list_tasks() if info.name.startswith("ruler-niah-")]
SENTENCE = re.compile(r"One of the special magic (numbers|uuids) for (\S+) is: (\S+)\.")
# Variant -> needles in the text (None: as many as fit), values asked for, kind of value.
SHAPES = {
    "single-1": (1, 1, "numbers"),
    "single-2": (1, 1, "numbers"),
    "single-3": (1, 1, "uuids"),
    "multikey-1": (4, 1, "numbers"),
    "multikey-2": (None, 1, "numbers"),
    "multikey-3": (None, 1, "uuids"),
    "multivalue": (4, 4, "numbers"),
    "multiquery": (4, 4, "numbers"),
}


def load(variant: str, *, seed: int = 0, data: str | None = None, **extra: str) -> TaskData:
    extra = {"questions": "6", "lengths": "3000", **extra}
    task = get_task(f"ruler-niah-{variant}")
    return task.load(TaskOptions(data=data, seed=seed, extra=extra))


def test_words_are_distinct_and_plain() -> None:
    for words in (ADJECTIVES, NOUNS):
        assert len(words) == len(set(words)) >= 200
        assert all(re.fullmatch("[a-z]+", word) for word in words)


def test_all_variants_are_known() -> None:
    assert {f"ruler-niah-{variant}" for variant in SHAPES} == set(NAMES)


@pytest.mark.parametrize("variant", SHAPES)
def test_needles_and_answers(variant: str) -> None:
    num_needles, num_values, kind = SHAPES[variant]
    task = get_task(f"ruler-niah-{variant}")
    data = load(variant)
    assert len({problem.question for problem in data.problems}) == 6
    for problem in data.problems:
        found = SENTENCE.findall(problem.question)
        assert {match[0] for match in found} == {kind}
        assert len(found) == num_needles if num_needles else len(found) > 10
        assert len({value for _, _, value in found}) == len(found)
        query = re.search(r"magic \w+ for (.*) mentioned", problem.question.splitlines()[-1])
        assert query is not None
        keys = re.split(", and |, ", query[1])
        expected = [value for key in keys for _, k, value in found if k == key]
        assert sorted(problem.answer.split()) == sorted(expected)
        assert len(expected) == num_values
        assert task.score(problem, f" {problem.answer}.")["contains-all"].correct
        # Prompt and answer, at four characters a token.
        used = len(problem.question) + len(problem.metadata["reply"]) + 4 * 128
        assert 3000 - 160 <= used <= 3000


def test_the_prompt_for_one_value() -> None:
    problem = load("single-1").problems[0]
    lines = problem.question.splitlines()
    ((_, key, value),) = SENTENCE.findall(problem.question)
    assert re.fullmatch(r"[a-z]+-[a-z]+", key)
    assert re.fullmatch(r"[1-9][0-9]{6}", value)
    assert lines[0] == (
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards."
    )
    assert set(lines[1:-1]) == {
        "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
        f"One of the special magic numbers for {key} is: {value}.",
    }
    assert lines[-1] == (
        f"What is the special magic number for {key} mentioned in the provided text?"
    )
    assert problem.metadata["reply"] == (
        f" The special magic number for {key} mentioned in the provided text is"
    )


def test_the_prompt_for_several_values() -> None:
    problem = load("multiquery").problems[0]
    lines = problem.question.splitlines()
    assert lines[0] == (
        "Some special magic numbers are hidden within the following text. Make sure to memorize "
        "it. I will quiz you about the numbers afterwards."
    )
    word = "[a-z]+-[a-z]+"
    described = f"the special magic numbers for {word}, {word}, {word}, and {word} mentioned in the"
    assert re.fullmatch(rf"What are all {described} provided text\?", lines[-1])
    assert re.fullmatch(
        rf" {described.replace('the', 'The', 1)} provided text are", problem.metadata["reply"]
    )


def test_the_reply_begins_below_the_prompt() -> None:
    task, data = get_task("ruler-niah-single-2"), load("single-2")
    prompts = prompts_of(task.tree(data, 3))
    assert [(prompt.id, prompt.samples) for prompt in prompts] == [
        (problem.id, 3) for problem in data.problems
    ]
    *_, above, node = prompts[0].path
    assert above.content == data.problems[0].question
    assert node.content == data.problems[0].metadata["reply"]
    assert node.metadata == {"role": "assistant"}


def test_depths_are_measured_where_there_is_one_needle() -> None:
    for problem in load("single-2", questions="40").problems:
        context = "\n".join(problem.question.splitlines()[1:-1])
        start = context.index("One of the special")
        assert problem.metadata["depth"] == start / len(context)
    depths = [p.metadata["depth"] for p in load("single-2", questions="40").problems]
    assert min(depths) < 0.15 and max(depths) > 0.8
    assert load("multivalue").problems[0].metadata["depth"] is None


@pytest.mark.parametrize(
    ("text", "answer", "credit"),
    [
        (" 1111111, 2222222, 3333333 and 4444444.", "1111111 2222222 3333333 4444444", 1.0),
        (" 4444444 1111111 1111111", "1111111 4444444", 0.5),
        (" 9999999", "9999999", 0.0),
        (" x1111111y", "1111111", 0.25),
        (" 11111110", "1111111", 0.25),
        (" none", None, 0.0),
        ("", None, 0.0),
    ],
)
def test_string_match_all(text: str, answer: str | None, credit: float) -> None:
    problem = Problem("p", "q", "1111111 2222222 3333333 4444444")
    verdict = get_task("ruler-niah-multivalue").score(problem, text)["contains-all"]
    assert verdict == Verdict(answer, credit == 1, credit)


def test_uuids_match_in_any_case() -> None:
    problem = load("single-3").problems[0]
    task = get_task("ruler-niah-single-3")
    verdict = task.score(problem, f" {problem.answer.upper()}!")["contains-all"]
    assert verdict == Verdict(problem.answer, True, 1.0)
    assert not task.score(problem, f" {problem.answer[:-1]}")["contains-all"].correct


def test_report_has_string_match_all_by_length_and_depth() -> None:
    task = get_task("ruler-niah-single-2")
    data = load("single-2", lengths="2000,3000", questions="4")
    scores = [
        SampleScore(p.id, 0, "length", task.score(p, p.answer if "-2000-" in p.id else ""))
        for p in data.problems
    ]
    ids = [problem.id for problem in data.problems]
    options = ReportOptions(problem_ids=ids, num_samples=1, problems=data.problems)
    report = task.aggregate(scores, options)
    assert report.value("string_match_all", "contains-all") == 0.5
    by_length, by_depth = report.tables
    assert [row[:3] for row in by_length.rows] == [("2,000", 4, 1.0), ("3,000", 4, 0.0)]
    assert len(by_depth.rows) == 10
    bare = ReportOptions(problem_ids=ids, num_samples=1)
    assert task.aggregate(scores, bare).tables == ()


def test_partial_credit_is_in_string_match_all_only() -> None:
    task, data = get_task("ruler-niah-multivalue"), load("multivalue", questions="2")
    scores = [
        SampleScore(p.id, 0, "length", task.score(p, p.answer.split()[0])) for p in data.problems
    ]
    options = ReportOptions(
        problem_ids=[p.id for p in data.problems], num_samples=1, problems=data.problems
    )
    report = task.aggregate(scores, options)
    assert report.value("string_match_all", "contains-all") == 0.25
    assert report.value("exact_match", "contains-all") == 0
    assert len(report.tables) == 1


def test_problems_follow_the_seed_and_not_their_number() -> None:
    data = load("multikey-2")
    assert data == load("multikey-2")
    assert load("multikey-2", questions="3").problems == data.problems[:3]
    assert load("multikey-2", seed=1).problems[0].question != data.problems[0].question


def test_problems_are_the_same_on_every_machine() -> None:
    """Other texts need another version of the task."""
    problem = load("multikey-3", lengths="16000").problems[0]
    assert hashlib.sha256(problem.question.encode()).hexdigest()[:16] == "07457ba2b2fcfb52"
    assert get_task("ruler-niah-multikey-3").version == "1"


@pytest.mark.parametrize("variant", SHAPES)
def test_a_length_that_nothing_fits_in_is_refused_at_once(variant: str) -> None:
    with pytest.raises(
        InputError, match=r"must be more than .* because the answer may be that long"
    ):
        load(variant, lengths="512")
    with pytest.raises(InputError, match=f"a prompt of ruler-niah-{variant} needs"):
        load(variant, lengths="600")


def test_a_haystack_with_more_needles_than_there_are_keys_is_refused() -> None:
    with pytest.raises(InputError, match="at most 48,600 keys"):
        load("multikey-2", lengths="9000000", questions="1")


def test_other_refusals(tmp_path: Path) -> None:
    path = tmp_path / "hay.txt"
    path.write_text("The special magic of the sea.")
    with pytest.raises(DataError, match="already contains 'special magic'"):
        load("single-2", data=str(path))
    with pytest.raises(InputError, match="data is not supported"):
        load("single-1", data=str(path))
    with pytest.raises(InputError, match="no argument 'question'"):
        load("single-2", question="3")
    with pytest.raises(InputError, match="does not support few-shot examples"):
        get_task("ruler-niah-single-1").load(TaskOptions(num_fewshot=1))


def test_essays_from_a_real_book(data_dir: Path) -> None:
    data = load("multiquery", data=str(data_dir / "text" / "war_and_peace.txt"), lengths="500000")
    assert all("Prince Vasili" in problem.question for problem in data.problems)
    assert all(len(SENTENCE.findall(problem.question)) == 4 for problem in data.problems)
