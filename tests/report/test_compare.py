"""Comparing two runs: the tests and intervals, and what is refused."""

import math
import random
import re
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import Command, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from report_cases import answer_with, edit_run, make_run
from scipy import stats

from treegen import evaluate
from treegen.evals.statistics.estimators import holm
from treegen.report.compare import METHOD, Difference, _compute_difference, compare_runs
from treegen.report.load import load_run


def differ(a: list[float], b: list[float], clusters: list[int] | None = None) -> Difference:
    return _compute_difference("accuracy", "numeric", a, b, clusters)


# The numbers


def test_right_and_wrong_are_compared_as_bonett_and_price_do() -> None:
    a = [0.0] * 12 + [1.0] * 3 + [1.0] * 40 + [0.0] * 45
    b = [1.0] * 12 + [0.0] * 3 + [1.0] * 40 + [0.0] * 45
    found = differ(a, b)
    assert found.method == METHOD and (found.better, found.worse) == (12, 3)
    assert found.value == pytest.approx(0.09)
    # Bonett and Price's center and spread, 13/102 - 4/102 and 17/102 - (9/102)**2, with t(101).
    error = math.sqrt((17 / 102 - (9 / 102) ** 2) / 101)
    half = 1.983731003 * error
    assert found.p_value == pytest.approx(2 * stats.t.sf(9 / 102 / error, 101))
    assert found.low == pytest.approx(9 / 102 - half, abs=1e-6)
    assert found.high == pytest.approx(9 / 102 + half, abs=1e-6)


def test_shares_are_compared_by_problem() -> None:
    rng = random.Random(1)
    a = [rng.randrange(21) / 20 for _ in range(300)]
    b = [min(1.0, x + rng.choice([0.0, 0.1, 0.2, -0.1])) for x in a]
    found = differ(a, b)
    assert found.method == METHOD
    array = np.array(b) - np.array(a)
    # Two imaginary problems among so many make the normal interval a little wider.
    half = 1.96 * array.std(ddof=1) / math.sqrt(300)
    assert found.low is not None and found.high is not None
    assert 2 * half < found.high - found.low < 2.1 * half
    assert (found.low + found.high) / 2 == pytest.approx(array.mean(), abs=0.1 * half)
    assert found.p_value is not None and found.p_value < 0.001


def test_pairing_finds_what_two_intervals_would_not() -> None:
    # Problems differ far more among each other than the runs do on any of them.
    a = [i / 1000 for i in range(900)]
    b = [x + 0.03 + 0.01 * (i % 2) for i, x in enumerate(a)]
    found = differ(a, b)
    assert found.low is not None and found.low > 0.03


def test_intervals_hold_the_truth_about_as_often_as_they_say() -> None:
    rng = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        a = rng.random(60) < 0.5
        b = np.where(rng.random(60) < 0.3, rng.random(60) < 0.7, a)
        found = differ(a.astype(float).tolist(), b.astype(float).tolist())
        assert found.low is not None and found.high is not None
        hits += found.low <= 0.3 * 0.2 <= found.high
    assert 182 <= hits <= 200


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=12))
def test_any_values_give_an_interval_around_the_difference(
    pairs: list[tuple[float, float]],
) -> None:
    a, b = ([pair[i] for pair in pairs] for i in range(2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = differ(a, b)
    assert found.value == pytest.approx(sum(b) / len(b) - sum(a) / len(a), abs=1e-9)
    if len(pairs) == 1:
        assert found.low is found.high is found.p_value is None
        return
    assert found.low is not None and found.high is not None and found.p_value is not None
    assert -1 <= found.low <= found.high <= 1 and 0 < found.p_value <= 1
    assert found.better + found.worse <= len(pairs)


def test_a_run_does_not_differ_from_itself() -> None:
    for values in ([0.5] * 8, [0.1, 0.9, 0.3], [0.0, 1.0, 1.0]):
        found = differ(values, values)
        assert (found.value, found.p_value) == (0, 1)
        assert found.low is not None and found.high is not None
        assert found.low <= 0 <= found.high


def test_interval_moves_little_when_one_problem_has_a_share() -> None:
    same = [0.0, 1.0] * 5
    whole, share = differ(same, same), differ(same, [1 / 40, *same[1:]])
    assert whole.low == pytest.approx(share.low, abs=0.01)
    assert whole.high == pytest.approx(share.high, abs=0.01)


def test_swapping_the_runs_turns_the_sign() -> None:
    rng = random.Random(2)
    a, b = ([rng.randrange(5) / 4 for _ in range(40)] for _ in range(2))
    there, back = differ(a, b), differ(b, a)
    assert there.value == pytest.approx(-back.value)
    assert (there.better, there.worse) == (back.worse, back.better)
    assert there.low == pytest.approx(-(back.high or 0), abs=0.01)


@pytest.mark.parametrize("num_samples", [1, 2, 64])
def test_a_p_value_is_below_one_twentieth_where_the_interval_leaves_zero_out(
    num_samples: int,
) -> None:
    rng = np.random.default_rng(num_samples)
    seen = {False: 0, True: 0}
    for number in range(600):
        num = int(rng.integers(2, 100))
        rates = rng.beta(1, 1, num)
        second = np.clip(rates + rng.normal(rng.choice([0, 0.05, 0.2]), 0.1, num), 0, 1)
        a, b = (rng.binomial(num_samples, each) / num_samples for each in (rates, second))
        clusters = rng.integers(0, 1 + num // 3, num).tolist() if number % 3 == 0 else None
        found = differ(a.tolist(), b.tolist(), clusters)
        assert found.low is not None and found.high is not None and found.p_value is not None
        left_out = found.low > 0 or found.high < 0
        assert (found.p_value < 0.05) == left_out, (a, b, clusters)
        seen[left_out] += 1
    assert min(seen.values()) > 50


def test_sharp_differences_of_some_dozens_of_problems_are_found() -> None:
    """Of 40 problems with 64 samples each, as a paired t-test finds them, or nearly."""
    rng = np.random.default_rng(3)
    found = plain = 0
    for _ in range(200):
        rates = rng.beta(2, 2, 40)
        second = np.clip(rates + rng.normal(0.05, 0.1, 40), 0, 1)
        a, b = (rng.binomial(64, each) / 64 for each in (rates, second))
        p_value = differ(a.tolist(), b.tolist()).p_value
        assert p_value is not None
        found += p_value < 0.05
        plain += stats.ttest_rel(a, b).pvalue < 0.05
    assert 0.75 * plain < found < plain


def test_holms_p_values() -> None:
    """By definition: the smallest p-value times all, the next one times one less, and so on."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5, 0.9, 0.8]) == [1.0, 1.0, 1.0]
    assert holm([0.01, None, 0.02, 0.03]) == pytest.approx([0.03, None, 0.04, 0.04])
    assert holm([0.0105, 0.0075]) == pytest.approx([0.015, 0.015])
    assert holm([0.01, 0.04]) == pytest.approx([0.02, 0.04])
    assert holm([0.01]) == [0.01] and holm([None]) == [None] and holm([]) == []
    # Of ten true null hypotheses one is found in 39% of cases without it.
    rng = np.random.default_rng(0)
    wrong = [
        min(each for each in holm(row) if each is not None) < 0.05
        for row in rng.random((2000, 10)).tolist()
    ]
    assert np.mean(wrong) < 0.07


# Runs


def test_each_metric_that_both_have_is_compared(treegen: Command, tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", num_problems=30, num_samples=8)
    b = make_run(tmp_path / "b", num_problems=30, num_samples=8, seed=1)
    done = treegen("compare", a, b)
    assert done.code == 0, done.err
    found = done.document
    assert [row["metric"] for row in found["differences"][:3]] == ["accuracy", "maj@8", "pass@8"]
    assert {row["filter"] for row in found["differences"]} == {
        "numeric",
        "strict-match",
        "flexible-extract",
    }
    first, votes, passed = found["differences"][:3]
    reports = [load_run(path).report for path in (a, b)]
    assert reports[0] is not None and reports[1] is not None
    assert first["a"] == pytest.approx(reports[0].value("exact_match", "numeric"))
    assert first["b"] == pytest.approx(reports[1].value("exact_match", "numeric"))
    assert votes["a"] == pytest.approx(
        next(r.value for r in reports[0].majority if (r.filter, r.k) == ("numeric", 8))
    )
    assert passed["method"] == first["method"] == METHOD
    rows = found["differences"]
    assert len(rows) > 2
    assert [row["p_holm"] for row in rows] == pytest.approx(holm([row["p_value"] for row in rows]))
    assert "p (Holm)" in done.out and f"adjusted for the {len(rows)} lines" in done.out
    assert len(first["by_problem"]) == 30
    assert {Path(path).suffix for path in found["plots"]} == {".svg", ".png"}
    assert all(Path(path).stat().st_size for path in found["plots"])
    assert METHOD in done.out
    assert "conclusion (p (Holm) < 0.05): no difference is shown in any metric\n" in done.out
    (tokens,) = [line for line in done.out.splitlines() if line.startswith("tokens: ")]
    assert re.search(r", p [<.\d]+ \(not part of the conclusion\)$", tokens)
    assert (
        "--output-path and --no-plots cannot be used together"
        in treegen("compare", a, b, "-o", "x", "--no-plots").error
    )
    again = treegen("compare", a, b, "-q").document
    assert again["differences"] == found["differences"]


def test_runs_of_other_sizes_are_compared_by_what_both_have(tmp_path: Path) -> None:
    a = load_run(make_run(tmp_path / "a", num_samples=3))
    b = load_run(make_run(tmp_path / "b", num_samples=5))
    metrics = [row.metric for row in compare_runs(a, b).differences[:3]]
    assert metrics == ["accuracy", "maj@3", "pass@3"]
    one = load_run(make_run(tmp_path / "c", num_samples=1))
    (first, *_) = compare_runs(one, one).differences
    assert (first.metric, first.p_value) == ("accuracy", 1.0)


def test_two_lines_are_adjusted_and_a_single_one_is_not(tmp_path: Path) -> None:
    views = [
        load_run(make_run(tmp_path / name, num_problems=30, num_samples=1, seed=seed))
        for seed, name in enumerate("ab")
    ]
    for num in (1, 2):
        a, b = (replace(view, filters=view.filters[:num]) for view in views)
        found = compare_runs(a, b)
        p_values = [row.p_value for row in found.differences]
        assert len(p_values) == num and None not in p_values
        adjusted = [row.p_holm for row in found.differences]
        assert adjusted == (holm(p_values) if num > 1 else [None])
        assert ("p (Holm): adjusted for the 2 lines" in str(found)) == (num > 1)


def test_runs_of_other_problems_are_refused(treegen: Command, tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", num_problems=6, num_samples=2)
    fewer = make_run(tmp_path / "fewer", num_problems=5, num_samples=2)
    error = treegen("compare", a, fewer).error
    assert (
        "different problems: 5 in common, 1 only in" in error and "`treegen eval --limit`" in error
    )
    content = make_run(tmp_path / "content", num_problems=6, num_samples=2, questions=["1 - 1?"])
    assert "but different content" in treegen("compare", a, content).error
    version = make_run(tmp_path / "version", num_problems=6, num_samples=2)
    edit_run(version, lambda run: run["settings"]["identity"]["task"].update(version="0"))
    assert "compare runs of the same task and version" in treegen("compare", a, version).error


def _ask(path: Path, data: Path, answers: list[int], question: str, template: str) -> Path:
    """Make a run of the task jsonl over a file of questions."""
    rows = [
        {"id": f"q{i}", "question": f"{question} {i}?", "answer": str(answer)}
        for i, answer in enumerate(answers)
    ]
    write_jsonl(data, rows)
    arguments = {"template": template, "answer": "number"}
    options: dict[str, Any] = {"max_tokens": 2, "eager": True, "task_args": arguments}
    evaluate("jsonl", "demo", data=str(data), output=path, **options)
    return path


def test_runs_with_other_templates_are_compared(treegen: Command, tmp_path: Path) -> None:
    plain, numbers = "{question}", [0, 1, 2]
    a = _ask(tmp_path / "a", tmp_path / "data.jsonl", numbers, "What is", plain)
    b = _ask(tmp_path / "b", tmp_path / "data.jsonl", numbers, "What is", "Q: {question}\nA:")
    copied = _ask(tmp_path / "c", tmp_path / "copy.jsonl", numbers, "What is", "{question}!")
    for other in (b, copied):
        done = treegen("compare", a, other, "--no-plots")
        assert done.code == 0, done.err
        assert "differ in: template '{question}' / '" in done.out
    question = _ask(tmp_path / "d", tmp_path / "other.jsonl", numbers, "Name", "{question}!")
    assert (
        "different content: 3 of 3 questions differ, such as that of 'q0' ('What is 0?' / "
        "'Name 0?!'); make both runs with the same --data"
    ) in treegen("compare", a, question).error
    answer = _ask(tmp_path / "e", tmp_path / "answers.jsonl", [0, 7, 2], "What is", plain)
    error = treegen("compare", a, answer).error
    assert "1 of 3 references differ, such as that of 'q1' ('1' / '7')" in error


def test_problems_in_another_order_are_paired_by_id(tmp_path: Path) -> None:
    a = load_run(make_run(tmp_path / "a", num_problems=6, num_samples=3))
    ids = tuple(reversed(a.info.problem_ids))
    identity = {**a.info.identity, "data": {**a.info.identity["data"], "problems": "other"}}
    turned = replace(
        a,
        info=replace(a.info, problem_ids=ids, identity=identity),
        problems=tuple(reversed(a.problems)),
    )
    found = compare_runs(a, turned)
    assert found.num_equal == 18 and set(found.differences[0].by_problem) == {0.0}
    assert found.problem_ids == a.info.problem_ids


def test_unfinished_problems_are_left_out_only_if_asked(treegen: Command, tmp_path: Path) -> None:
    a = make_run(tmp_path / "a", num_problems=5, num_samples=3)
    b = make_run(tmp_path / "b", num_problems=5, num_samples=3, done=[3, 2, 3, 3, 0])
    assert "2 of 5 problems are unfinished" in treegen("compare", a, b).error
    done = treegen("compare", a, b, "--partial")
    assert done.document["left_out"] == ["p1", "p4"] and "2 unfinished ones left out" in done.out
    c = make_run(tmp_path / "c", num_problems=5, num_samples=3, done=[0] * 5)
    assert "no problem is finished in both runs" in treegen("compare", a, c, "--partial").error


def test_a_missing_library_is_named(
    treegen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    run = make_run(tmp_path / "a", num_problems=3, num_samples=2)
    for name in [name for name in sys.modules if name.split(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    assert "pip install '.[report]'" in treegen("compare", run, run).error


def test_the_conclusion_names_its_rule(tmp_path: Path) -> None:
    """And each metric whose p-value is below 0.05 only before the adjustment."""
    a, b = (
        load_run(make_run(tmp_path / name, num_problems=9, seed=i)) for i, name in enumerate("ab")
    )
    found = compare_runs(a, b)

    def conclude(*p_values: tuple[float | None, float | None]) -> str:
        rows = [
            replace(row, p_value=p, p_holm=adjusted, value=0.1)
            for row, (p, adjusted) in zip(found.differences, p_values, strict=False)
        ]
        text = str(replace(found, differences=tuple(rows)))
        return text.partition("conclusion ")[2].partition("\n")[0]

    names = [row.metric for row in found.differences[:3]]
    assert names == ["accuracy", "maj@8", "pass@8"]
    assert conclude((0.0169, 0.0506), (0.3, 0.6), (0.03, 0.06)) == (
        "(p (Holm) < 0.05): no difference is shown in any metric; before adjustment, accuracy has "
        "p 0.0169, pass@8 has p 0.0300"
    )
    assert conclude((0.001, 0.003), (0.03, 0.06), (0.3, 0.6)) == (
        "(p (Holm) < 0.05): B is better in accuracy; no difference is shown in maj@8, pass@8; "
        "before adjustment, maj@8 has p 0.0300"
    )
    assert conclude((0.2, None)) == "(p < 0.05): no difference is shown in accuracy"
    assert conclude((0.2, None), (0.6, None)) == "(p < 0.05): no difference is shown in any metric"
    assert conclude((0.01, None), (None, None)) == (
        "(p < 0.05): B is better in accuracy; no difference is shown in maj@8"
    )


def test_a_better_run_is_found_to_be_better(tmp_path: Path) -> None:
    def better(rng: random.Random, number: int, index: int) -> str:
        return f" The answer is {number}." if index % 2 else answer_with(rng, number, index)

    a = load_run(make_run(tmp_path / "a", num_problems=40))
    b = load_run(make_run(tmp_path / "b", num_problems=40, draw=better))
    found = compare_runs(a, b)
    first = found.differences[0]
    assert "<0.0001" in str(replace(found, differences=(replace(first, p_value=1e-7),)))
    assert first.low is not None and first.low > 0
    assert first.p_value is not None and first.p_value < 0.01
    conclusion = str(found).partition("conclusion (p (Holm) < 0.05): ")[2].partition("\n")[0]
    assert conclusion.startswith("B is better in accuracy")
    assert "conclusion (p (Holm) < 0.05): A is better in accuracy" in str(compare_runs(b, a))
