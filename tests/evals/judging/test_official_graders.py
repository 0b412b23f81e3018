"""Two official graders: the numbers are those that their own scripts gave for the same texts.

simple-evals' SimpleQAEval, and FastChat's readers with its show_result.py, were run on these texts.
"""

import random

import pytest
from verdict_texts import texts

from treegen.errors import InputError
from treegen.evals.judging.judgements import Judgement, JudgementSet
from treegen.evals.judging.published_scores import (
    Game,
    mt_bench_pairs,
    mt_bench_scores,
    official_tables,
    simpleqa_scores,
)
from treegen.evals.judging.rubric import load_rubric
from treegen.evals.judging.settings import JudgeRun, JudgeSettings


def test_simpleqa_scores_as_its_script() -> None:
    assert simpleqa_scores(texts(400, 3)) == pytest.approx(
        {
            "is_correct": 0.2575,
            "is_incorrect": 0.18,
            "is_not_attempted": 0.5625,
            "is_given_attempted": 0.4375,
            "accuracy_given_attempted": 0.5885714285714286,
            "f1": 0.35826086956521747,
        }
    )
    assert simpleqa_scores(["", "INCORRECT"])["is_not_attempted"] == 1  # the C of INCORRECT
    assert simpleqa_scores(["C"])["f1"] == 0
    with pytest.raises(InputError, match="at least one"):
        simpleqa_scores([])


def test_mt_bench_rates_as_its_script() -> None:
    rng = random.Random(0)
    judged = [(f"m{rng.randrange(4)}", rng.choice([1, 2]), text) for text in texts(300, 100)]
    found = mt_bench_scores(judged)
    assert {model: each["average"] for model, each in found.items()} == pytest.approx(
        {
            "m0": 6.578125,
            "m1": 6.214285714285714,
            "m2": 6.5227272727272725,
            "m3": 6.705882352941177,
        }
    )
    assert found["m1"]["first"] == pytest.approx(6.035714285714286)
    assert found["m1"]["second"] == pytest.approx(6.392857142857143)
    replies = {"[[7]] or [[8]]": 7, "[6]": 6, "[[x]] [4.5]": 4.5, "7": None}
    for reply, rating in replies.items():
        assert mt_bench_scores([("m", 1, reply)])["m"]["first"] == rating
    assert mt_bench_scores([("m", 1, "none")]) == {
        "m": {"first": None, "second": None, "average": None}
    }


def test_mt_bench_pairs_win_as_in_its_script() -> None:
    rng = random.Random(0)
    said = texts(300, 100)
    [(rng.randrange(4), rng.choice([1, 2])) for _ in said]
    games = []
    for i in range(0, 300, 2):
        a, b = rng.sample(["m0", "m1", "m2"], 2)
        games.append(Game(a, b, said[i], said[i + 1]))
    found = mt_bench_pairs(games)
    counts = {m: (each["win"], each["loss"], each["tie"]) for m, each in found.items()}
    assert counts == {"m0": (0, 1, 7), "m1": (4, 0, 8), "m2": (0, 3, 7)}
    assert found["m1"]["win_rate_adjusted"] == pytest.approx(2 / 3)


def of_texts(
    said: list[str], rubric: dict[str, object], *, pairs: bool = False
) -> list[JudgementSet]:
    """A judging of two runs, or of one, whose judge has written some texts, as it is read."""
    settings = JudgeSettings(rubric=load_rubric({**rubric}), verdicts="samples")
    runs = tuple({"path": path} for path in ("runs/a", "runs/b")[: 1 + pairs])
    judging = JudgeRun("name", "j", "0", settings, runs, "ANSWER_1f")
    shown = [((0, 0), (1, 0)), ((1, 0), (0, 0))] if pairs else [((0, 0),)]
    found = []
    for number, text in enumerate(said):
        problem, order = f"p{number // len(shown)}", number % len(shown)
        verdict = settings.rubric.read(text)
        value = None if verdict is None else settings.rubric.choices[verdict]
        found.append(Judgement(problem, shown[order], 0, 0, 0, verdict, value, text=text))
    return [JudgementSet(judging, tuple(found))]


def test_a_judging_with_an_official_reader_has_the_official_scores() -> None:
    said = texts(400, 11)
    letters = {"choices": {"A": 1, "B": 0, "C": 0}, "wordings": ["{{ answer }}"]}
    _, found = official_tables(of_texts(said, {**letters, "reader": "simpleqa"}))
    assert found["simpleqa"]["name"] == simpleqa_scores(said)
    numbers = {"choices": list(range(1, 11)), "wordings": ["{{ answer }}"], "reader": "mt-bench"}
    (table,), found = official_tables(of_texts(said, numbers))
    assert found["mt_bench"]["name"] == mt_bench_scores([("a", 1, t) for t in said])["a"]["average"]
    assert table.rows == (("j", found["mt_bench"]["name"]),)
    both = {
        "choices": {"A": 1, "B": 0, "C": 0.5},
        "wordings": ["{{ answer_a }} {{ answer_b }}"],
        "pairs": True,
        "reader": "mt-bench-pair",
    }
    said = [t for t in texts(3000, 12) if "[[" in t]
    said = said[: len(said) // 2 * 2]
    (table,), found = official_tables(of_texts(said, both, pairs=True))
    games = [Game("runs/a", "runs/b", said[i], said[i + 1]) for i in range(0, len(said), 2)]
    assert found["mt_bench_pairs"]["name"] == mt_bench_pairs(games)
    assert [row[1] for row in table.rows] == ["a", "b"]
    assert official_tables(of_texts(["x"], {**letters, "wordings": ["{{ answer }}"]})) == ([], {})
