"""--speculate and --draft-model: the same samples, and what is told of guesses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
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
        assert ("guessed tokens: " in done.out) == bool(drafted)
        # It changes no sample, so the run may be resumed without, and nothing is left of it.
        assert treegen("eval", "--resume", run, "--speculate", "off", "-q").code == 0


def test_what_cannot_guess_is_refused_before_weights_are_loaded(
    treegen: Command, tiny: Path, no_weights: None, elsewhere: None
) -> None:
    asked = ("eval", "gsm8k", "-M", tiny, *SMALL)
    for options, told in (
        (("--speculate", "medusa"), "speculate must be off or ngram"),
        (("--draft-tokens", "0"), "--draft-tokens must be at least 1"),
        (("--draft-tokens", "4"), "--draft-tokens is of no use"),
        (("--draft-tokens", "4", "--speculate", "off"), "--draft-tokens is of no use"),
        (("--draft-model", "demo"), "demo has another tokenizer"),
        (("--draft-model", "demo", "--speculate", "ngram"), "leave out one of the two"),
    ):
        refused = treegen(*asked, *options)
        assert refused.code == 2 and told in refused.err, refused.err


def test_bench_decode_draws_recorded_samples_again(treegen: Command, tmp_path: Path) -> None:
    trace = {
        "source": "a test",
        "prompts": [[3, 4, 5], [6, 7]],
        "samples": [[[8, 9, 10, 11] * 4, [8, 9, 10, 11] * 3], [[12, 13] * 5, [14, 15]]],
    }
    path = tmp_path / "trace.json"
    path.write_text(json.dumps(trace))
    asked = ("bench", "decode", "--speculate", "--shape", "tiny", "--rows", "3", "--prefix", "20")
    done = treegen(*asked, "--trace", path, "--repeats", "1", "--memory", "16MiB", "--json")
    assert done.code == 0, done.err
    (result,) = done.document["results"]
    assert result["job"] == {"rows": 3, "samples": 64, "prefix": 20, "own_tokens": 0}
    assert result["tokens_per_step"] >= 1 and result["steps"][1] <= result["steps"][0]
    own = treegen(
        *asked,
        "--trace",
        path,
        "--own-tokens",
        "30",
        "--repeats",
        "1",
        "--memory",
        "16MiB",
        "--json",
    )
    (result,) = own.document["results"]
    assert result["job"] == {"rows": 3, "samples": 3, "prefix": 20, "own_tokens": 30}
    assert "takes --rows" in treegen(*asked, "--grid").err
    assert "are for --speculate" in treegen("bench", "decode", "--own-tokens", "5").err


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[1]",
        "[" * 100_000,
        '{"source": 1, "prompts": 5, "samples": 5}',
        '{"source": 1, "prompts": [], "samples": []}',
        '{"source": 1, "prompts": [[1]], "samples": [[]]}',
        '{"source": 1, "prompts": [[1]], "samples": [[[2, "x"]]]}',
        '{"source": 1, "prompts": [[1]], "samples": [[[2, 1.5]]]}',
        '{"source": 1, "prompts": [[-1]], "samples": [[[2, 3]]]}',
        '{"source": 1, "prompts": [[1], [2]], "samples": [[[2, 3]]]}',
        '{"source": 1, "prompts": [[1]], "samples": [[[2, 3], [2]]]}',
    ],
)
def test_a_trace_without_samples_is_refused_before_a_model_is_made(
    treegen: Command, tmp_path: Path, no_weights: None, text: str
) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    asked = ("bench", "decode", "--speculate", "--shape", "tiny", "--rows", "3")
    refused = treegen(*asked, "--trace", path)
    assert refused.code == 2 and "holds no recorded samples: give" in refused.err, refused.err
    assert f"cannot read {tmp_path}: " in treegen(*asked, "--trace", tmp_path).err


def test_help_tells_how_many_tokens_are_guessed(treegen: Command) -> None:
    told = " ".join(treegen("eval", "--help-all").out.split())
    assert f"guessed for a pass at most. Default: {DRAFT_TOKENS}." in told
