"""Which judgements are drawn: all repeats, or as many as settle what most of them say."""

import itertools
import random
from collections import Counter
from pathlib import Path

import pytest
from judging_cases import LETTERS, rubric_file, small_run

import treegen
from treegen.evals.judging.judgement_files import read_records
from treegen.evals.judging.prompts import JudgedCase
from treegen.evals.judging.repeats import RepeatScheduler, is_settled, majority
from treegen.evals.judging.rubric import load_rubric
from treegen.evals.judging.settings import JudgeSettings

VERDICTS = ("A", "B", None)


@pytest.mark.parametrize("repeats", [1, 2, 3, 4, 5, 7])
def test_what_is_settled_stays_so_whatever_the_rest_says(repeats: int) -> None:
    for count in range(1, repeats + 1):
        for said in itertools.product(VERDICTS, repeat=count):
            left = repeats - count
            ends = [
                Counter([*said, *rest]).most_common()
                for rest in itertools.combinations_with_replacement(VERDICTS, left)
            ]
            sure = all(len(end) == 1 or end[0][1] > end[1][1] for end in ends)
            same = sure and len({end[0][0] for end in ends}) == 1
            assert is_settled(said, left) == same
            if same:
                assert majority(said) == ends[0][0][0]


class _Lines:
    """Stands for the lines of a judging."""

    def __init__(self) -> None:
        self.done: dict[object, str] = {}
        self.verdicts: dict[object, str | None] = {}


@pytest.mark.parametrize("decided", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_stopping_early_draws_fewer_and_decides_the_same(decided: bool, seed: int) -> None:
    """Each case's verdicts are fixed beforehand; they come in any order, with stops between."""
    rng = random.Random(seed)
    rubric = load_rubric("correctness")
    repeats = rng.randrange(2, 8)
    settings = JudgeSettings(rubric=rubric, repeats=repeats, verdicts="samples", decided=decided)
    cases = [JudgedCase(f"p{i}", ((0, 0),), 0, 0) for i in range(12)]
    answers = {case.id: rng.choices(VERDICTS, (5, 2, 1), k=repeats) for case in cases}
    lines = _Lines()
    got: dict[str, list[int]] = {case.id: [] for case in cases}
    while True:
        scheduler = RepeatScheduler(settings, cases, lines)  # type: ignore[arg-type]
        if not scheduler.num_missing:
            break
        waiting = [(case, i) for case, each in scheduler.take_due() for i in each]
        stop = rng.randrange(1, 30)
        while waiting and stop:
            case, repeat = waiting.pop(rng.randrange(len(waiting)))
            key = case.problem_id, case.slot(repeat)
            assert key not in lines.done
            lines.done[key], lines.verdicts[key] = "", answers[case.id][repeat]
            got[case.id].append(repeat)
            scheduler.add(case, repeat, answers[case.id][repeat])
            waiting += [(case, i) for case, each in scheduler.take_due() for i in each]
            stop -= 1
        if not waiting:
            assert scheduler.done == scheduler.planned
    for case in cases:
        drawn = sorted(got[case.id])
        verdicts = [answers[case.id][i] for i in drawn]
        if not decided:
            assert drawn == list(range(repeats))
        elif len(drawn) < repeats:
            assert drawn == list(range(len(drawn)))
            assert is_settled(verdicts, repeats - len(drawn))
            assert majority(verdicts) == majority(answers[case.id])


def test_a_run_that_stops_early_says_what_all_repeats_say(tmp_path: Path) -> None:
    run, rubric = small_run(tmp_path / "run"), rubric_file(tmp_path, LETTERS)
    how = {"wordings": 1, "repeats": 5, "max_tokens": 6, "temperature": 2.0, "progress": False}
    with treegen.LLM("demo", device="cpu", memory="32MiB") as llm:
        both = [
            treegen.judge(run, rubric, llm, stop_when=stop, **how)  # type: ignore[arg-type]
            for stop in (None, "decided")
        ]
    texts: list[dict[tuple[str, str], dict[int, str]]] = []
    read = load_rubric(rubric).read
    for found in both:
        (judged,) = found.summaries[0].judged
        texts.append({})
        for record in read_records(run, judged.judging.name):
            case = record["problem_id"], str(record["answers"])
            texts[-1].setdefault(case, {})[record["repeat"]] = record["text"]
    whole, early = texts
    assert whole.keys() == early.keys()
    assert sum(map(len, whole.values())) == 60 > sum(map(len, early.values())) >= 36
    for case, texts_of_case in early.items():
        assert sorted(texts_of_case) == list(range(len(texts_of_case)))
        assert len(texts_of_case) == 5 or is_settled(
            [read(text) for text in texts_of_case.values()], 5 - len(texts_of_case)
        )
        assert whole[case][0] == texts_of_case[0]
