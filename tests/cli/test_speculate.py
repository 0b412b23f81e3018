"""--speculate and --draft-model: the same samples, and what is told of guesses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from cli_cases import SMALL, Command

from treegen.model.options import DRAFT_TOKENS


def _samples(run: Path) -> dict[tuple[str, int], tuple[str, int]]:
    lines = (run / "samples.jsonl").read_text().splitlines()
    return {
        (each["problem_id"], each["sample_index"]): (each["text"], each["num_tokens"])
        for each in map(json.loads, lines)
    }


def test_a_run_with_guesses_has_the_samples_of_one_without(
    treegen: Command, tiny: Path, finished: Path, tmp_path: Path
) -> None:
    small = shutil.copytree(tiny, tmp_path / "small")
    for number, options in enumerate(
        (("--speculate", "ngram"), ("--draft-model", small, "--draft-tokens", "5"))
    ):
        run = tmp_path / str(number)
        done = treegen("eval", "gsm8k", "-M", tiny, *SMALL, *options, "-o", run)
        assert done.code == 0, done.err
        assert _samples(run) == _samples(finished)
        results = json.loads((run / "results.json").read_text())
        drafted = results["usage"]["drafted_tokens"]
        assert 0 <= results["usage"]["accepted_tokens"] <= drafted
        assert ("draft tokens: " in done.out) == bool(drafted)
        # It changes no sample, so the run may be resumed without, and nothing is left of it.
        assert treegen("eval", "--resume", run, "--speculate", "off", "-q").code == 0


def test_what_cannot_guess_is_refused_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None, elsewhere: None
) -> None:
    arguments = ("eval", "gsm8k", "-M", tiny, *SMALL)
    for options, message in (
        (("--speculate", "medusa"), "speculate must be off or ngram"),
        (("--draft-tokens", "0"), "--draft-tokens must be at least 1"),
        (("--draft-tokens", "4"), "--draft-tokens requires --speculate or --draft-model"),
        (("--draft-tokens", "4", "--speculate", "off"), "--draft-tokens requires"),
        (("--draft-model", "demo"), "demo and the model have different tokenizers"),
        (("--draft-model", "demo", "--speculate", "ngram"), "remove one of the two"),
    ):
        refused = treegen(*arguments, *options)
        assert refused.code == 2 and message in refused.err, refused.err


def test_help_tells_how_many_tokens_are_guessed(treegen: Command) -> None:
    text = " ".join(treegen("eval", "--help-all").out.split())
    assert f"Maximum draft tokens per sample and forward pass. Default: {DRAFT_TOKENS}." in text
