"""Needle in a haystack: names, the dogs' prompt, its scores and its report."""

import hashlib
import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from cli_cases import Command
from hypothesis import given
from hypothesis import strategies as st

from treegen.errors import DataError, InputError
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import Report, ReportOptions
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore
from treegen.llm import LLM
from treegen.model.tokenizer import load_tokenizer
from treegen.prompts.tree import prompts_of
from treegen.tasks.needle.task import Needle
from treegen.tasks.needle.text import (
    COLOURS,
    NAMES,
    SECOND_NAMES,
    Haystack,
    draw_colours,
    draw_names,
    load_haystack,
)


def load(**given: str | int | None) -> TaskData:
    names = ("data", "limit", "num_fewshot", "seed", "split", "fewshot_file")
    general = {name: given.pop(name) for name in names if name in given}
    extra = {name: str(value) for name, value in given.items()}
    return Needle().load(TaskOptions(**general, extra=extra))  # type: ignore[arg-type]


def document_of(data: TaskData) -> str:
    start, end = "Start of document:\n", "\nEnd of document\n\n"
    assert data.fewshot.startswith(start)
    return data.fewshot.removeprefix(start).partition(end)[0]


def are_prefix_free(names: list[str]) -> bool:
    # A name that begins another stands directly before one of those that it begins.
    ordered = sorted(name.casefold() for name in names)
    return not any(after.startswith(before) for before, after in pairwise(ordered))


def test_names_are_many_distinct_and_none_begins_another() -> None:
    assert len(NAMES) >= 261
    assert are_prefix_free([*NAMES])
    assert are_prefix_free([*SECOND_NAMES])
    assert not {name.casefold() for name in (*NAMES, *SECOND_NAMES)} & set(COLOURS)


@given(st.integers(0, 99), st.integers(0, 3000))
def test_drawn_names_are_distinct_and_none_begins_another(seed: int, num: int) -> None:
    names = draw_names(random.Random(seed), num)
    assert len(names) == num
    assert are_prefix_free(names)
    firsts = Counter(name.split()[0] for name in names)
    assert not firsts or max(firsts.values()) <= -(-num // len(NAMES))


def test_too_many_names() -> None:
    with pytest.raises(InputError, match="dogs must be at most 8,"):
        load(questions=9999, length=10**7)


@given(st.integers(0, 99), st.integers(0, 100))
def test_colours_are_balanced(seed: int, num: int) -> None:
    colours = draw_colours(random.Random(seed), num)
    assert len(colours) == num
    counts = [colours.count(colour) for colour in COLOURS]
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        (b" \n", "is empty"),
        (b"caf\xe9", "is not UTF-8"),
        (b"Here the Dog named Rex sleeps.", "already contains 'the dog named'"),
    ],
)
def test_unusable_haystacks_are_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "hay.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=r"hay\.txt") as caught:
        load(data=str(path))
    assert message in str(caught.value)


def test_a_folder_without_texts_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no \*\.txt files"):
        load(data=str(tmp_path))


def test_a_text_without_spaces_is_cut_anywhere() -> None:
    haystack = Haystack("\u5929\u5730\u7384\u9ec3\u3002" * 1_000, "hay")
    for size in (3_000, 9_000, 12_000):
        assert size - 10 <= len(haystack.take(size)) <= size


def test_the_prompt_is_the_published_one(tmp_path: Path) -> None:
    path = tmp_path / "hay.txt"
    path.write_text("One fish swam by.\n\nTwo  birds flew off. A red car came.")
    data = load(data=str(path), questions=2, num_fewshot=1, length=200)
    prompts = prompts_of(Needle().tree(data, 3))
    assert [(prompt.id, prompt.samples) for prompt in prompts] == [("needle-0", 3), ("needle-1", 3)]
    assert "".join(str(node.content) for node in prompts[1].path) == (
        "Start of document:\n"
        "The dog named Walnut has fur that is blue. One fish swam by. The dog named Otto has fur "
        "that is red. Two birds flew off. A red car came. One fish swam by. The dog named Pebbles "
        "has fur that is cream.\n"
        "End of document\n"
        "\n"
        "Question: What color is the fur of the dog named Pebbles?\n"
        "Answer: ###Cream###\n"
        "\n"
        "Question: What color is the fur of the dog named Otto?\n"
        "Answer:"
    )
    assert [problem.answer for problem in data.problems] == ["Blue", "Red"]
    assert data.source == f"3 needles in {path}, repeated 1.4 times"


@pytest.mark.parametrize(("questions", "shots"), [(256, 5), (64, 5), (64, 0), (1024, 5), (1, 0)])
def test_every_needle_is_there_once_and_depths_are_even(questions: int, shots: int) -> None:
    length = 80 * (questions + shots) + 2000
    data = load(questions=questions, num_fewshot=shots, length=length)
    text = document_of(data)
    assert length - 200 <= len(text) <= length
    assert text.count("The dog named ") == questions + shots
    assert data.fewshot.count("Question: ") == data.num_fewshot == shots
    assert len({problem.question for problem in data.problems}) == questions
    for problem in data.problems:
        name = problem.question.removeprefix("What color is the fur of the dog named ")[:-1]
        sentence = f"The dog named {name} has fur that is {problem.answer.casefold()}."
        assert text.count(f"The dog named {name}") == 1
        assert problem.metadata["depth"] == text.index(sentence) / len(text)
        assert f"named {name}?" not in data.fewshot
    counts = Counter(problem.answer for problem in data.problems)
    assert max(counts.values()) <= -(-questions // 8)
    tenths = Counter(int(problem.metadata["depth"] * 10) for problem in data.problems)
    if questions >= 64:
        assert all(abs(tenths[i] - questions / 10) <= 6 for i in range(10)), tenths


def test_the_default_is_256_questions_on_80_000_characters() -> None:
    data = load()
    assert (len(data.problems), data.num_fewshot) == (256, 5)
    assert 79_900 <= len(document_of(data)) <= 80_000
    assert data.source.startswith("261 needles in 68,")
    # On every machine and Python. Another text needs another version of the task.
    assert hashlib.sha256(data.fewshot.encode()).hexdigest()[:16] == "4c1fb6ce8f64671b"
    assert Needle.version == "1"


def test_all_is_decided_by_the_seed_and_a_limit_only_leaves_out() -> None:
    data = load(questions=40, length=9000)
    assert data == load(questions=40, length=9000)
    few = load(questions=40, length=9000, limit=5)
    assert (few.fewshot, few.problems) == (data.fewshot, data.problems[:5])
    # The first few questions are already from everywhere in the text.
    assert len({int(problem.metadata["depth"] * 4) for problem in data.problems[:16]}) == 4
    other = load(questions=40, length=9000, seed=1)
    assert other.fewshot != data.fewshot
    assert [p.question for p in other.problems] != [p.question for p in data.problems]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"questions": 0}, "questions must be from 1 to 10,000, got 0"),
        ({"questions": "many"}, "questions must be an integer, got 'many'"),
        ({"questions": "\uff11"}, "must be an integer"),
        ({"questions": "1_0"}, "must be an integer"),
        ({"questions": "10,20"}, "must be an integer"),
        ({"length": 1000}, "a text with 261 needles needs 11,"),
        ({"lenght": 1000}, "no argument 'lenght'; did you mean 'length'"),
        ({"tokenizer": " "}, "tokenizer must not be empty"),
        ({"split": "test"}, "split is not supported"),
        ({"fewshot_file": "a"}, "fewshot_file is not supported"),
    ],
)
def test_bad_options(given: dict[str, str | int], message: str) -> None:
    with pytest.raises(InputError) as caught:
        load(**given)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        (" ###White###", "White", "White"),
        (" ###White###\n\nQuestion: ###Black###", "White", "White"),
        (" ### White ###", "White", "White"),
        (" ###Wh,ite###", "White", None),
        (" ###white###", "white", "White"),
        (" ###White.###", "White.", "White"),
        (" ###Black###", "Black", "Black"),
        (" ###White", None, "White"),
        (" ##White##", None, "White"),
        (" ###White\n###", None, "White"),
        (" ######", None, None),
        (" White", None, "White"),
        (" It is WHITE, not black", None, "White"),
        (" not black but white", None, "Black"),
        (" whitewashed", None, None),
        (" ###Color###", "Color", None),
        ("\nQuestion: is it white?", None, None),
        ("", None, None),
        ("###" * 10_000, None, None),
        ("#" * 100_001 + "\x00", None, None),
    ],
)
def test_scores(text: str, strict: str | None, flexible: str | None) -> None:
    verdicts = Needle().score(Problem("p", "q", "White"), text)
    assert {name: verdict.answer for name, verdict in verdicts.items()} == {
        "strict-match": strict,
        "flexible-extract": flexible,
    }
    assert verdicts["strict-match"].correct == (strict == "White")
    assert verdicts["flexible-extract"].correct == (flexible == "White")


def report_on(data: TaskData, texts: dict[str, str], **options: int) -> Report:
    task = Needle()
    scores = [
        SampleScore(problem.id, 0, "length", task.score(problem, texts.get(problem.id, "")))
        for problem in data.problems
    ]
    planned = ReportOptions(
        problem_ids=[problem.id for problem in data.problems],
        num_samples=1,
        problems=data.problems if options.get("known", True) else (),
    )
    return task.aggregate(scores, planned)


def test_report_has_accuracy_by_depth_and_the_constant_answer() -> None:
    data = load(questions=64, length=9000)
    upper = [problem for problem in data.problems if problem.metadata["depth"] < 0.5]
    report = report_on(data, {p.id: f" ###{p.answer}###\n\nQ" for p in upper})
    assert report.value("exact_match", "strict-match") == len(upper) / 64
    assert report.value("invalid", "strict-match") == 1 - len(upper) / 64
    assert report.value("constant_answer", "none") == 8 / 64
    (table,) = report.tables
    assert table.columns == ("Depth", "Problems", "Accuracy", "Stderr", "Low", "High")
    assert [row[0] for row in table.rows] == [f"{10 * i}-{10 * i + 10}%" for i in range(10)]
    assert [row[2] for row in table.rows] == [1.0] * 5 + [0.0] * 5
    assert sum(int(row[1] or 0) for row in table.rows) == 64


def test_a_constant_answer_scores_what_the_report_says() -> None:
    data = load(questions=20, length=9000, limit=13)
    (colour, _), *_ = Counter(problem.answer for problem in data.problems).most_common(1)
    report = report_on(data, {p.id: f"###{colour}###" for p in data.problems})
    constant = report.value("constant_answer", "none")
    assert constant == pytest.approx(report.value("exact_match", "strict-match"))


def test_report_without_problems_has_no_tables() -> None:
    assert report_on(load(questions=8, length=2000), {}, known=False).tables == ()


def test_a_run_computes_the_document_once(tiny: Path) -> None:
    task = Needle()
    data = load(questions=16, length=3000)
    llm = LLM(str(tiny), device="cpu", memory="8MiB")
    done = llm.run(task.tree(data, 1), task.defaults.sampling)
    assert [c.prompt_id for c in done.completions] == [p.id for p in data.problems]
    assert {c.num_tokens for c in done.completions} <= set(range(1, 11))
    assert done.usage.prompt_tokens_computed < done.usage.prompt_tokens_unshared / 10
    assert done.usage.prefill_seconds > 0 and done.usage.decode_seconds > 0


def test_an_answer_ends_where_the_next_question_begins() -> None:
    """Else every answer is cut off by its limit, and the rate of cut-off ones says nothing."""
    task, data = Needle(), load(questions=8, length=2000)
    llm = LLM("demo", device="cpu", memory="64MiB", compile=False)
    done = llm.run(task.tree(data, 1), task.defaults.sampling).completions
    verdicts = [
        task.score(p, c.text)["strict-match"] for p, c in zip(data.problems, done, strict=True)
    ]
    assert sum(verdict.correct for verdict in verdicts) > 4
    assert {completion.finish_reason for completion in done} == {"stop"}


def test_a_text_that_does_not_fit_the_model_says_how_to_shorten_it(
    treegen: Command, tiny: Path
) -> None:
    for task, option in (
        ("needle", "length"),
        ("needle-grid", "lengths"),
        ("ruler-niah-single-1", "lengths"),
    ):
        error = treegen("plan", task, "-M", tiny, "-T", f"{option}=20000").error
        assert "the model's context of 4,096" in error and f"-T {option}=N" in error


def test_lengths_in_tokens(tiny: Path) -> None:
    tokenizer = load_tokenizer(tiny)
    data = load(questions=16, length=1500, tokenizer=str(tiny))
    num_tokens = len(tokenizer(document_of(data))["input_ids"])
    assert 1500 - 40 <= num_tokens <= 1500
    assert data.source.endswith(f", {num_tokens:,} tokens")


def test_needles_over_a_real_book(data_dir: Path) -> None:
    path = data_dir / "text" / "war_and_peace.txt"
    haystack = load_haystack(str(path))
    assert haystack.text.startswith('CHAPTER I "Well, Prince, so Genoa and Lucca are now just')
    assert len(haystack.text) > 3_000_000
    data = load(data=str(path))
    text = document_of(data)
    assert 79_900 <= len(text) <= 80_000
    assert data.source.endswith(f"characters of {path}")
    tenths = Counter(int(problem.metadata["depth"] * 10) for problem in data.problems)
    assert sorted(tenths) == list(range(10))
    assert min(tenths.values()) >= 23
    # Needles stand between sentences almost everywhere.
    before = [text[:i].rstrip()[-1] for i in range(1, len(text)) if text.startswith("The dog", i)]
    assert sum(c in ".!?\"'" for c in before) >= 0.99 * len(before)
