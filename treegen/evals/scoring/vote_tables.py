"""Tables of votes other than the majority, and of votes at the time when each problem stopped."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from treegen.common.files import describe_read_error
from treegen.errors import InputError, Message, RunError, arg
from treegen.evals.config.stop_rule import NEVER
from treegen.evals.problem import Problem
from treegen.evals.statistics.confidence import STOPPED
from treegen.evals.statistics.estimators import difference_interval, estimate
from treegen.evals.statistics.metrics import Clusters, clusters_of
from treegen.evals.statistics.tables import Cell, Table
from treegen.evals.statistics.votes import tally
from treegen.evals.statistics.weighted import (
    ALL,
    NUMBERS,
    SUBSETS,
    USC,
    VoteRule,
    add_likelihood,
    check_weights,
    read_numbers,
    weighted_at_k,
)
from treegen.evals.verdict import SampleScore
from treegen.runs import Key, RunDir
from treegen.runs.files import parse_sample_line, read_sample_lines

if TYPE_CHECKING:
    from treegen.evals.early_stopping import Rounds
    from treegen.evals.job import Job

SCORES: Final = "scores.jsonl"
"""The file of scores in a run directory, by a verifier or by the user's own reward model."""
_NO_LOGPROB: Final = "a sample without tokens has no log-probability"
_REMEDIES: Final = {
    "certainty": f"start a new run with {arg('self_certainty', True)}",
    "score": f"write the scores to {SCORES} in the run directory",
    "logprob": _NO_LOGPROB,
    "likelihood": _NO_LOGPROB,
    USC: "run `treegen usc`, so that the model picks samples",
}


@dataclass(frozen=True, slots=True)
class VoteInputs:
    """Inputs of votes that are not in the records of samples."""

    scores: Mapping[Key, float] = field(default_factory=dict)
    """The score of each sample, by (problem, index)."""
    picks: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """For each problem, the index of the sample that the model found most consistent, and the
    number of first samples that it chose from."""

    @staticmethod
    def of(path: Path) -> "VoteInputs":
        """Return the scores and picks in a run directory.

        Raises:
            RunError: a file is corrupt.
        """
        from treegen.evals.scoring.universal_self_consistency import read_picks

        return VoteInputs(_read_scores(path / SCORES), read_picks(path))

    def complete(
        self, problem_id: str, index: int, numbers: Mapping[str, float]
    ) -> dict[str, float]:
        """Return all numbers of a sample that votes can use, by name.

        Args:
            problem_id: The problem of the sample.
            index: The index of the sample.
            numbers: The numbers in its record.
        """
        weights = add_likelihood(numbers)
        if (score := self.scores.get((problem_id, index))) is not None:
            weights["score"] = score
        return weights


NO_VOTES: Final = VoteInputs()


def _read_scores(path: Path) -> dict[Key, float]:
    """Return the scores in a file whose lines have problem_id, sample_index and score."""
    scores: dict[Key, float] = {}
    if not path.exists():
        return scores
    try:
        lines = read_sample_lines(path)
    except OSError as error:
        raise RunError(describe_read_error(path, error)) from None
    except UnicodeDecodeError:
        raise RunError(f"{path} is not in UTF-8; restore the file from a copy") from None
    for number, line in lines:
        try:
            key, row = parse_sample_line(line)
            score = row["score"]
            if isinstance(score, bool) or not math.isfinite(score):
                raise ValueError("the score is not a finite number")
            if key in scores:
                raise ValueError("this sample already has a score")
            scores[key] = float(score)
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise RunError(
                f"{path}:{number} has no valid score ({error}); each line must be a JSON object "
                "with problem_id, sample_index and score"
            ) from None
    return scores


def vote_table(
    scores: Sequence[SampleScore],
    filters: Sequence[str],
    names: Sequence[str],
    ks: Sequence[int],
    inputs: VoteInputs = NO_VOTES,
    problems: Sequence[Problem] = (),
) -> Table:
    """Return a table of votes, with the difference to maj@k over the same problems.

    Args:
        scores: The scored samples.
        filters: Names of the filters.
        names: The votes; see `explain_votes`. A vote that cannot be computed has no value, and its
            name in the table says why.
        ks: Samples in a vote; a universal self-consistency vote has the number that was shown.
        inputs: Scores and picks, which are not in the records of samples.
        problems: The problems of the samples, for error bars that are clustered by group.
    """
    samples_of: dict[str, list[SampleScore]] = {}
    for sample in sorted(scores, key=lambda sample: (sample.problem_id, sample.sample_index)):
        numbers = inputs.complete(sample.problem_id, sample.sample_index, sample.numbers)
        sample = replace(sample, numbers=numbers)
        samples_of.setdefault(sample.problem_id, []).append(sample)
    every = [sample.numbers for group in samples_of.values() for sample in group]
    reasons = explain_votes(names, every, inputs)
    rows: list[tuple[Cell, ...]] = []
    for filter in filters:
        scored = {
            problem_id: group_values
            for problem_id, group in samples_of.items()
            if (group_values := [sample for sample in group if filter in sample.verdicts])
        }
        groups = list(scored.values())
        clusters = clusters_of(problems, list(scored))
        for name, reason in reasons.items():
            if reason:
                rows.append((Message(f"{name} ({reason.marked})"), filter, None, *[None] * 6))
                continue
            for k in sorted({num for _, num in inputs.picks.values()}) if name == USC else ks:
                cells = _values(name, groups, filter, k, inputs, clusters)
                if cells is not None:
                    rows.append((name, filter, k, *cells))
    return Table(
        "Votes beside the majority, with 95% intervals over problems"
        + (f" (below all samples, means over {SUBSETS} subsets at most)" if len(ks) > 1 else ""),
        ("Vote", "Filter", "k", "Value", "Low", "High", "Less maj@k", "Low ", "High "),
        tuple(rows),
    )


def read_voters(job: "Job", run: RunDir) -> tuple[list[dict[str, float]], VoteInputs]:
    """Return the numbers of each voting sample of a run by name, and the scores and picks.

    Args:
        job: The job of the run.
        run: The run.

    Raises:
        RunError: the scores or picks in the directory are corrupt.
    """
    settings, inputs = job.settings, VoteInputs.of(run.path)
    num = settings.num_samples if settings.stop_when == NEVER else settings.first_round
    numbers = [
        inputs.complete(record["problem_id"], record["sample_index"], read_numbers(record))
        for record in run.records()
        if record["sample_index"] < num
    ]
    return numbers, inputs


def explain_votes(
    names: Sequence[str], numbers: Sequence[Mapping[str, float]], inputs: VoteInputs
) -> dict[str, Message]:
    """Return why votes cannot be computed.

    A vote needs a number of every sample, and some rules need numbers from 0.

    Args:
        names: The votes. "all" means each vote for which the samples have numbers, with its default
            rule.
        numbers: The numbers of each sample, by name.
        inputs: Scores and picks.

    Returns:
        The reason by the full name of the vote; an empty message if the vote can be computed.
    """
    available = set(NUMBERS)
    for group_values in numbers:
        available &= group_values.keys()
    reasons: dict[str, Message] = {}
    for name in names:
        if name == ALL:
            votes = [VoteRule.of(number).name for number in NUMBERS if number in available]
            votes += [USC] if inputs.picks else []
        else:
            votes = [name if name == USC else VoteRule.of(name).name]
        for vote in votes:
            number = vote.partition(":")[0]
            is_missing = not (inputs.picks if vote == USC else number in available)
            how = _REMEDIES.get(number, f"start a new run with {arg('confidence=')}")
            num = sum(number not in group_values for group_values in numbers)
            what = f"{num:,} of {len(numbers):,} samples have no {number}"
            reasons[vote] = Message(f"{what}; {how}" if is_missing else "")
            if not is_missing and vote != USC:
                try:
                    check_weights(
                        VoteRule.of(vote),
                        np.array([group_values[number] for group_values in numbers]),
                    )
                except InputError as error:  # such as a negative weight
                    reasons[vote] = error.message
    return reasons


def _values(
    name: str,
    groups: Sequence[Sequence[SampleScore]],
    filter: str,
    k: int,
    inputs: VoteInputs,
    clusters: Clusters,
) -> tuple[Cell, ...] | None:
    """Return the value of a vote with its interval, and its difference to maj@k with its interval.

    Args:
        name: The vote.
        groups: The samples of each problem.
        filter: Name of the filter.
        k: Samples in the vote.
        inputs: Scores and picks.
        clusters: The cluster of each problem for error bars.

    Returns:
        The mean over problems, its low and high end, the mean difference, and its low and high end;
        None if a problem has no value.
    """
    values, differences = [], []
    for group in groups:
        verdicts = [sample.verdicts[filter] for sample in group]
        if name == USC:
            # The vote has a value only for the number of samples that the model chose from.
            picked, num_shown = inputs.picks.get(group[0].problem_id, (0, 0))
            verdicts = verdicts[:k]
            is_valid = picked < k == num_shown == len(verdicts)
            if not is_valid or group[k - 1].sample_index != k - 1:
                return None
            value = float(verdicts[picked].correct)
        else:
            vote = VoteRule.of(name)
            value = weighted_at_k(
                vote,
                [sample.numbers[vote.number] for sample in group],
                [verdict.answer for verdict in verdicts],
                [verdict.correct for verdict in verdicts],
                k,
            )
        if math.isnan(value):
            return None
        values.append(min(1.0, value))
        differences.append(value - tally(verdicts).maj_at_k(k))
    if not values:
        return None
    mean = estimate(values, clusters)
    low, high = difference_interval(differences, clusters)
    difference = math.fsum(differences) / len(differences)
    return mean.value, mean.low, mean.high, difference, low, high


def stop_tables(job: "Job", scores: Sequence[SampleScore], rounds: "Rounds") -> list[Table]:
    """Return tables of votes of stopped problems, and of samples that ended for low confidence.

    Args:
        job: The job of the run.
        scores: The scored samples.
        rounds: Early stopping, which knows the voters of each problem.
    """
    voters = rounds.voters()
    groups: dict[str, list[SampleScore]] = {}
    for sample in scores:
        if sample.sample_index < voters.get(sample.problem_id, 0):
            groups.setdefault(sample.problem_id, []).append(sample)
    tokens = sum(sample.num_tokens for sample in scores)
    rows: list[tuple[Cell, ...]] = []
    for filter in job.task.filters if groups else ():
        values = []
        for group in groups.values():
            verdicts = [sample.verdicts[filter] for sample in group]
            values.append(tally(verdicts).maj_at_k(len(verdicts)))
        mean = estimate(values, clusters_of(job.data.problems, list(groups)))
        samples = sum(map(len, groups.values()))
        error = (mean.value, mean.stderr, mean.low, mean.high)
        rows.append((filter, len(values), *error, samples, tokens))
    tables = [
        Table(
            "Votes when problems had stopped (the other metrics are of the first "
            f"{job.settings.first_round} samples of each problem, which no stop depends on)"
            if job.settings.stop_when != NEVER
            else "Votes (samples that ended for a lack of confidence have none, and are wrong)",
            ("Filter", "Problems", "Vote", "Stderr", "Low", "High", "Samples", "Tokens"),
            tuple(rows),
        )
    ]
    if job.settings.stops_samples:
        first = job.settings.first_round
        kinds: dict[str, list[int]] = {"warm-up": [], "whole": [], "ended early": []}
        for sample in scores:
            kind = "ended early" if sample.finish_reason == STOPPED else "whole"
            kinds["warm-up" if sample.sample_index < first else kind].append(sample.num_tokens)
        rows = [
            (kind, len(group_values), sum(group_values)) for kind, group_values in kinds.items()
        ]
        tables.append(Table("Samples by confidence", ("Kind", "Samples", "Tokens"), tuple(rows)))
    return tables
