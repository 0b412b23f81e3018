"""Tables of the official SimpleQA and MT-Bench scores, for judge runs with their readers."""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from treegen.evals.judging.judgements import JudgementSet
from treegen.evals.judging.published_scores import (
    Game,
    mt_bench_pairs,
    mt_bench_scores,
    simpleqa_scores,
)
from treegen.evals.statistics.tables import Cell, Table


def official_tables(judged: Sequence[JudgementSet]) -> tuple[list[Table], dict[str, Any]]:
    """Return the scores of SimpleQA or MT-Bench as tables, and as an object for JSON.

    Both are empty if the rubric has another reader or no judgement has a text.
    """
    make = {"simpleqa": _simpleqa, "mt-bench": _ratings, "mt-bench-pair": _games}
    reader = judged[0].judging.asked.rubric.reader
    with_texts = [judge_run for judge_run in judged if _texts(judge_run)]
    return make[reader](with_texts) if reader in make and with_texts else ([], {})


def _texts(judged: JudgementSet) -> list[str]:
    return [judgement.text for judgement in judged.judgements if not judgement.too_long]


def _simpleqa(judged: Sequence[JudgementSet]) -> tuple[list[Table], dict[str, Any]]:
    scores = {judge_run.judging.name: simpleqa_scores(_texts(judge_run)) for judge_run in judged}
    names = next(iter(scores.values()))
    table = Table(
        "SimpleQA's scores",
        ("Judge", *(name.removeprefix("is_").replace("_", " ") for name in names)),
        tuple(
            (judge_run.judging.judge, *scores[judge_run.judging.name].values())
            for judge_run in judged
        ),
    )
    return [table], {"simpleqa": scores}


def _ratings(judged: Sequence[JudgementSet]) -> tuple[list[Table], dict[str, Any]]:
    """Return the average MT-Bench rating by each judge, with all texts as first turns."""
    ratings = {
        each.judging.name: mt_bench_scores([("", 1, text) for text in _texts(each)])[""]["average"]
        for each in judged
    }
    rows = tuple((each.judging.judge, ratings[each.judging.name]) for each in judged)
    return [Table("MT-Bench's score", ("Judge", "Average rating"), rows)], {"mt_bench": ratings}


def _games(judged: Sequence[JudgementSet]) -> tuple[list[Table], dict[str, Any]]:
    runs = [str(each["path"]) for each in judged[0].judging.runs]
    scores_of: dict[str, Any] = {}
    rows: list[tuple[Cell, ...]] = []
    for each in judged:
        texts: dict[Any, dict[bool, str]] = defaultdict(dict)
        for one in each.judgements:
            swapped = one.shown[0] > one.shown[1]
            pair = one.shown[::-1] if swapped else one.shown
            texts[pair, one.problem_id, one.wording, one.repeat][swapped] = one.text
        scores = scores_of[each.judging.name] = mt_bench_pairs(
            [
                Game(runs[pair[0][0]], runs[pair[1][0]], both[False], both[True])
                for (pair, *_), both in texts.items()
                if len(both) == 2
            ]
        )
        rows += [
            (each.judging.judge, Path(run).name or run, *scores[run].values())
            for run in runs
            if run in scores
        ]
    head = ("Judge", "Run", "Win", "Loss", "Tie", "Win rate", "Loss rate", "Adjusted win rate")
    return [Table("MT-Bench's wins", head, tuple(rows))], {"mt_bench_pairs": scores_of}
