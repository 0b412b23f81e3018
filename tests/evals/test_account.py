"""The account of a run: which kernel read what, over parts, and what sharing saved."""

import json
import shutil
from pathlib import Path
from typing import Any

from cli_cases import EXAMPLES, Command, results_of

from treegen.common.outputs import Usage
from treegen.evals.config.eval_settings import resolve_eval_settings
from treegen.evals.progress.usage import attention_line, sum_usage


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
    total = sum_usage(parts, num_samples=3, unshared=9, kept=9)
    assert total["kernels"] == {"level 0": {"cudnn": 5, "triton": 1}}
    assert parts[0]["kernels"] == {"level 0": {"cudnn": 2}}
    assert total["seconds"] == 3.0


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
