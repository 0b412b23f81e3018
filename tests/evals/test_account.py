"""The account of a run: which kernel read what, over parts, and what sharing saved."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from cli_cases import EXAMPLES, Command, results_of
from report_cases import make_run

from treegen.common.outputs import Usage
from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.progress.usage import (
    attention_line,
    format_decoding,
    format_sharing,
    sum_usage,
)
from treegen.report.load import load_run
from treegen.report.tables import cards


def test_kernels_are_counted_by_level_from_the_root_to_the_own_keys() -> None:
    usage = Usage()
    for names in (["triton"], ["cudnn", "triton", "triton"], ["triton", "triton"]):
        usage.count_kernels(names)
    assert usage.kernels == {
        "own keys": {"triton": 3},
        "level 0": {"cudnn": 1, "triton": 1},
        "level 1": {"triton": 1},
    }


def test_kernels_of_parts_are_added_up() -> None:
    parts: list[dict[str, Any]] = [
        {"samples": 1, "seconds": 1.0, "kernels": {"level 0": {"cudnn": 2}}},
        {"samples": 1, "seconds": 1.0, "kernels": {"level 0": {"cudnn": 3, "triton": 1}}},
        {"samples": 1, "seconds": 1.0},  # by a version that did not count them
    ]
    total = sum_usage(parts, num_samples=3, unshared=9, sample_tokens=9)
    assert total["kernels"] == {"level 0": {"cudnn": 5, "triton": 1}}
    assert parts[0]["kernels"] == {"level 0": {"cudnn": 2}}
    assert total["seconds"] == 3.0


def test_a_field_that_was_edited_in_one_part_ends_no_sum() -> None:
    parts: list[dict[str, Any]] = [{"seconds": 1.0, "own": "a"}, {"seconds": 2.0, "own": 3}]
    total = sum_usage(parts, num_samples=1, unshared=1, sample_tokens=1)
    assert total["own"] == 3 and total["seconds"] == 3.0


def test_decoded_tokens_of_unfinished_samples_are_counted_apart() -> None:
    killed = {"samples": 4, "seconds": 10.0, "decoded_tokens": 900}
    resumed = {"samples": 6, "seconds": 10.0, "decoded_tokens": 600}
    undisturbed = sum_usage([resumed], num_samples=6, unshared=9, sample_tokens=600)
    assert format_decoding(undisturbed) == "decoded tokens: 600 at 60 per second"
    stopped = sum_usage([killed, resumed], num_samples=10, unshared=9, sample_tokens=1000)
    line = "decoded tokens: 1,500 at 75 per second, including 500 of unfinished samples"
    assert format_decoding(stopped) == line
    # Two samples ended after the last save before the kill.
    partial = sum_usage([killed, resumed], num_samples=12, unshared=9, sample_tokens=1100)
    assert format_decoding(partial) == (
        "decoded tokens: 1,500 at 75 per second, including at least 400 of unfinished samples; "
        "not counted: the last seconds before a kill"
    )
    unsaved = sum_usage([], num_samples=3, unshared=9, sample_tokens=80)
    assert format_decoding(unsaved) == (
        "decoded tokens: not recorded; the finished samples have 80 tokens"
    )
    assert format_sharing(unsaved) == "prompt tokens: not recorded"
    assert format_sharing({**partial, "prompt_tokens_computed": 5}) == (
        "prompt tokens: known for 10 of 12 samples, because a part of the run was killed"
    )


def test_a_report_gives_the_reason_for_unknown_numbers(tmp_path: Path) -> None:
    view = load_run(make_run(tmp_path / "run", num_problems=2, num_samples=1))
    usage = {**view.usage, "prompt_tokens_computed": 9, "decoded_tokens": 900, "sample_tokens": 90}
    shown = {card.label: card for card in cards(replace(view, usage=usage))}
    assert shown["prompt sharing"].value == "n/a" and "killed" in shown["prompt sharing"].more
    assert shown["tokens/s"].more == "900 tokens, 810 of them in unfinished samples"
    whole = {**usage, "samples_accounted": 2, "prompt_tokens_unshared": 18}
    shown = {card.label: card for card in cards(replace(view, usage=whole))}
    assert shown["prompt sharing"].value == "2.0\u00d7"


def test_one_line_says_which_kernel_read_which_level_and_what_was_saved() -> None:
    usage = {
        "impl": "cuda",
        "key_tokens_read": 69,
        "key_tokens_unshared": 1000,
        "plan": {"token_bytes": 2**20},
        "kernels": {
            "own keys": {"triton": 7},
            "level 10": {"triton": 1},
            "level 2": {"triton": 1},
            "level 0": {"triton": 2, "cudnn": 5},
        },
    }
    assert attention_line(usage) == (
        "attention: level 0 cudnn (5 steps) and triton (2 steps), level 2 triton, level 10 triton, "
        "own keys triton; key reads saved 93.1% (931.0 MiB of 1,000.0 MiB)"
    )
    assert attention_line({**usage, "kernels": {}}).startswith("attention: cuda; key reads saved")
    assert attention_line({"impl": "cuda", "key_tokens_unshared": 0}) == ""


def test_a_run_that_was_stored_before_kernels_were_counted_is_still_shown(
    treegen: Command, tmp_path: Path
) -> None:
    path = shutil.copytree(EXAMPLES / "run", tmp_path / "run")
    results = results_of(path)
    for part in results["parts"]:
        part.pop("kernels", None)
    (path / "results.json").write_text(json.dumps(results))
    done = treegen("show", path)
    assert done.code == 0, done.err
    assert f"attention: {results['parts'][-1]['impl']}; key reads saved 9" in done.out


def test_settings_of_speed_stay_what_a_run_was_begun_with() -> None:
    settings = {"task": "gsm8k", "model": "m"}
    old = resolve_eval_settings(
        {}, {**settings, "eager": False, "compile": False, "run_ahead": False}
    ).engine
    assert (old.eager, old.compile, old.run_ahead) == (False, False, False)
    new = resolve_eval_settings({**settings, "eager": True}).engine
    assert (new.eager, new.compile, new.run_ahead) == (True, None, None)
