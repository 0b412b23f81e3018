"""Scores of two published graders and their tables, computed from the texts that a judge wrote.

The scores equal those of the published scripts on the same texts, including their faults. The tests
compare them with the scripts if these are available. `treegen.evals.judging.rubric` reads the
texts.

- SimpleQA: openai/simple-evals, simpleqa_eval.py.
- MT-Bench: lm-sys/FastChat, fastchat/llm_judge/common.py, gen_judgment.py and show_result.py.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from treegen.common.checks import check_argument_types
from treegen.errors import InputError
from treegen.evals.judging.judgements import JudgementSet
from treegen.evals.judging.rubric import mt_bench, mt_bench_pair, simpleqa
from treegen.evals.statistics.tables import Cell, Table


@check_argument_types
def simpleqa_scores(texts: Sequence[str]) -> dict[str, float]:
    """Return SimpleQA's scores from the grader's replies.

    Args:
        texts: The reply for each question.

    Returns:
        The scores by name. is_correct, is_incorrect, is_not_attempted and is_given_attempted are
        shares of all questions. accuracy_given_attempted is the accuracy on attempted questions,
        and f1 the harmonic mean of it and is_correct; both are 0 if undefined.

    Raises:
        InputError: there is no text.
    """
    if not texts:
        raise InputError("SimpleQA's scores need at least one verdict")
    letters = [simpleqa(text, "ABC") for text in texts]
    correct, incorrect, missing = (letters.count(letter) / len(texts) for letter in "ABC")
    attempted = correct + incorrect
    accuracy = correct / attempted if attempted > 0 else 0.0
    total = accuracy + correct
    return {
        "is_correct": correct,
        "is_incorrect": incorrect,
        "is_not_attempted": missing,
        "is_given_attempted": attempted,
        "accuracy_given_attempted": accuracy,
        "f1": 2 * accuracy * correct / total if total > 0 else 0.0,
    }


@check_argument_types
def mt_bench_scores(judged: Sequence[tuple[str, int, str]]) -> dict[str, dict[str, float | None]]:
    """Return MT-Bench's scores of each model: first turn, second turn and average.

    The average is over all judgements, so turns with more ratings weigh more, as in show_result.py.

    Args:
        judged: (model, turn, text) of each judgement. A text without a rating is left out of all
            means.

    Returns:
        Scores by model and name ("first", "second", "average"); None without ratings.
    """
    ratings: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for model, turn, text in judged:
        ratings[model]  # creates the entry, so that models without a rating are listed too
        if (rating := mt_bench(text, ())) is not None:
            ratings[model][turn].append(float(rating))
    return {
        model: {
            "first": _mean(turns.get(1, [])),
            "second": _mean(turns.get(2, [])),
            "average": _mean([rating for turn in turns.values() for rating in turn]),
        }
        for model, turns in ratings.items()
    }


@dataclass(frozen=True, slots=True)
class Game:
    """A pair of answers that was judged in both orders."""

    model_1: str
    model_2: str
    first: str
    """The judgement with model_1 as A."""
    second: str
    """The judgement with model_1 as B."""


@check_argument_types
def mt_bench_pairs(games: Sequence[Game]) -> dict[str, Mapping[str, float]]:
    """Return MT-Bench's pairwise scores of models: wins, losses, ties and their rates.

    A pair counts as a win or loss if both orders agree, and otherwise as a tie. It is left out if
    either text has no verdict. win_rate_adjusted counts a tie as half a win.

    Args:
        games: The judged pairs.

    Returns:
        Scores by model and name.
    """
    counts: dict[str, dict[str, float]] = {}
    for game in games:
        read = [mt_bench_pair(text, "ABC") for text in (game.first, game.second)]
        if None in read:
            continue
        of_first = {"A": game.model_1, "B": game.model_2, "C": None}[str(read[0])]
        of_second = {"A": game.model_2, "B": game.model_1, "C": None}[str(read[1])]
        winner = of_first if of_first == of_second else None
        for model in (game.model_1, game.model_2):
            tally = counts.setdefault(model, {"win": 0.0, "loss": 0.0, "tie": 0.0})
            tally["tie" if winner is None else "win" if winner == model else "loss"] += 1
    for tally in counts.values():
        total = tally["win"] + tally["loss"] + tally["tie"]
        tally["win_rate"], tally["loss_rate"] = tally["win"] / total, tally["loss"] / total
        tally["win_rate_adjusted"] = (tally["win"] + 0.5 * tally["tie"]) / total
    return dict(counts)


def _mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def official_tables(judged: Sequence[JudgementSet]) -> tuple[list[Table], dict[str, Any]]:
    """Return the scores of SimpleQA or MT-Bench as tables, and as an object for JSON.

    Both are empty if the rubric has another reader or no judgement has a text.
    """
    make = {"simpleqa": _simpleqa, "mt-bench": _ratings, "mt-bench-pair": _games}
    reader = judged[0].judging.settings.rubric.reader
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
        judge_run.judging.name: mt_bench_scores([("", 1, text) for text in _texts(judge_run)])[""][
            "average"
        ]
        for judge_run in judged
    }
    rows = tuple((judge_run.judging.judge, ratings[judge_run.judging.name]) for judge_run in judged)
    return [Table("MT-Bench's score", ("Judge", "Average rating"), rows)], {"mt_bench": ratings}


def _games(judged: Sequence[JudgementSet]) -> tuple[list[Table], dict[str, Any]]:
    runs = [str(judge_run["path"]) for judge_run in judged[0].judging.runs]
    scores_of: dict[str, Any] = {}
    rows: list[tuple[Cell, ...]] = []
    for judge_run in judged:
        texts: dict[Any, dict[bool, str]] = defaultdict(dict)
        for one in judge_run.judgements:
            swapped = one.shown[0] > one.shown[1]
            pair = one.shown[::-1] if swapped else one.shown
            key = pair, one.problem_id, one.wording, one.criterion, one.repeat
            texts[key][swapped] = one.text
        scores = scores_of[judge_run.judging.name] = mt_bench_pairs(
            [
                Game(runs[pair[0][0]], runs[pair[1][0]], both[False], both[True])
                for (pair, *_), both in texts.items()
                if len(both) == 2
            ]
        )
        rows += [
            (judge_run.judging.judge, Path(run).name or run, *scores[run].values())
            for run in runs
            if run in scores
        ]
    head = ("Judge", "Run", "Win", "Loss", "Tie", "Win rate", "Loss rate", "Adjusted win rate")
    return [Table("MT-Bench's wins", head, tuple(rows))], {"mt_bench_pairs": scores_of}
