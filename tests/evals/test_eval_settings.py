"""What an evaluation was asked for, taken apart for run.json and put together again."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest
from report_cases import make_run

from treegen.errors import InputError
from treegen.evals.arguments import parse_verifier_settings
from treegen.evals.config.base import check_no_unused
from treegen.evals.config.eval_settings import EvalSettings, resolve_eval_settings
from treegen.evals.config.type_checks import check_choices
from treegen.evals.identity import run_settings
from treegen.evals.job import load_job
from treegen.evals.search.settings import SearchSettings, resolve_search_settings
from treegen.evals.task import TaskOptions
from treegen.model.options import EngineOptions
from treegen.runs import RunDir
from treegen.runs.record_format import FREE


def identity_of(settings: EvalSettings) -> dict[str, Any]:
    """The choices that change a sample, as a run directory gives them back."""
    found: dict[str, Any] = json.loads(json.dumps(settings.identity()))
    return found


def test_what_a_task_does_to_its_draws_is_compared_and_comes_back() -> None:
    plain = resolve_eval_settings({"task": "gsm8k", "model": "m"})
    own = replace(plain.sampling, min_tokens=8, logit_bias={5: 2.5, 3: -1.0})
    before, now = identity_of(plain), identity_of(replace(plain, sampling=own))
    # A run that sets neither is what it was before there were such settings.
    assert not {"min_tokens", "logit_bias"} & set(before["sampling"])
    assert now["sampling"]["min_tokens"] == 8
    assert now["sampling"]["logit_bias"] == {"5": 2.5, "3": -1.0}

    stored = {"task": "gsm8k", "model": "m", **now["sampling"], **now["prompt"]}
    again = resolve_eval_settings({}, {"fewshot_as_multiturn": False, **stored})
    assert again.sampling.min_tokens == 8 and dict(again.sampling.biases) == {5: 2.5, 3: -1.0}
    assert identity_of(again) == now


def test_a_resume_on_another_number_of_ranks_says_so(tmp_path: Path) -> None:
    """They add up in another order, so that reproducible samples differ too."""
    path = make_run(tmp_path / "run", num_problems=2, num_samples=3, done=[3, 1], device="cpu")
    settings = {
        "task": "gsm8k",
        "model": "made-up",
        "data": str(tmp_path / "run-data.jsonl"),
        "num_samples": 3,
        "device": "cpu",
        "reproducible": True,
    }
    notices = []
    for ranks in (1, 2, 2):
        job = load_job(resolve_eval_settings({**settings, "tensor_parallel_size": ranks}))
        with RunDir.resume(path, run_settings(job, dtype="float32", fingerprint="0")) as run:
            notices.append(run.notices)
    assert notices == [
        (),
        (
            "resumed with tensor_parallel_size 2 instead of 1: samples may differ from those drawn "
            "before",
        ),
        (),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stop_batch": 4}, "stop_batch= has no effect without stop_when="),
        ({"stop_batch": 4, "stop_when": "decided"}, ""),
        ({"stop_batch": 4, "confidence": {"keep": 0.5}}, "stop_batch= has no effect"),
        ({"thinking_end": "x"}, "thinking_end= has no effect without max_thinking_tokens="),
        ({"thinking_end": "x", "max_thinking_tokens": 5}, ""),
        ({"draft_tokens": 4}, "draft_tokens requires speculate or draft_model"),
        ({"draft_tokens": 4, "speculate": "ngram"}, ""),
    ],
)
def test_a_choice_that_nothing_reads_is_refused(settings: dict[str, Any], message: str) -> None:
    settings = {"task": "gsm8k", "model": "demo", **settings}
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check_no_unused(settings, [resolve_eval_settings(settings)])


@pytest.mark.parametrize(
    ("methods", "settings", "message"),
    [
        (
            ["beam"],
            {"exploration": 2.0},
            "exploration= has no effect on beam, which reads only width",
        ),
        (["beam", "mcts"], {"exploration": 2.0}, ""),
        (["beam", "sample"], {"num_samples": 2}, "num_samples= has no effect on beam"),
        (["sample"], {"verifier": "nowhere"}, "verifier= has no effect on sample"),
        (["beam"], {"verifier_memory": "1GiB"}, "verifier_memory= has no effect without"),
        (["beam"], {"verifier_memory": "1GiB", "verifier": "nowhere"}, ""),
    ],
)
def test_a_choice_that_no_method_reads_is_refused(
    methods: list[str], settings: dict[str, Any], message: str
) -> None:
    settings = {"task": "countdown", "model": "demo", **settings}
    runs = [resolve_search_settings({**settings, "method": method}) for method in methods]
    with pytest.raises(InputError, match=message) if message else nullcontext():
        check_no_unused(settings, runs)


def test_a_run_that_was_stored_with_a_number_of_guesses_goes_on() -> None:
    """Runs from before it was refused have it even if nothing guesses."""
    stored = {"task": "gsm8k", "model": "demo", "draft_tokens": 12, "speculate": None}
    assert resolve_eval_settings({}, stored).engine.draft_tokens is None
    stored |= {"speculate": "ngram"}
    assert resolve_eval_settings({}, stored).engine.draft_tokens == 12
    assert resolve_eval_settings({"speculate": "off"}, stored).engine.draft_tokens is None
    assert resolve_eval_settings({"draft_model": "demo"}, stored).engine.draft_tokens == 12


def test_a_wrong_list_is_named_with_what_it_should_contain() -> None:
    with pytest.raises(InputError, match="maj_ks must be a list of integers or None, got 2"):
        check_choices({"maj_ks": 2}, EvalSettings)


def test_free_settings_are_checked_by_the_types_of_their_fields() -> None:
    """What `FREE` says of each is what its field's annotation says, as JSON holds it."""
    held = {"Literal": str, "Sequence": list, "tuple": list, "Mapping": dict, "Confidence": dict}
    plain: dict[Any, type] = {str: str, int: int, float: float, bool: bool, NoneType: NoneType}
    own = [
        (EvalSettings, (*EvalSettings.FREE, "confidence")),
        (SearchSettings, SearchSettings.FREE),
    ]
    left_out = {"seed", "run_dir"}  # they are not stored here
    names = [each.name for each in fields(TaskOptions) if each.name not in left_out]
    speculate = {"DraftFunction": Callable[..., Any]}
    found = {}
    for kind, free in (*own, (TaskOptions, names), (EngineOptions, None)):
        hints = get_type_hints(kind, localns=speculate)
        for name in free or hints:
            parts = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else ()
            kinds = set()
            for part in parts or (hints[name],):
                origin = getattr(get_origin(part) or part, "__name__", str(get_origin(part)))
                kinds.add(plain.get(part) or held.get(origin.rpartition(".")[2]))
            found[name] = kinds - {None}
    found["memory"].add(float)  # such as "2.5", which the command line reads
    assert {name: set(FREE[name]) for name in found} == found


@pytest.mark.parametrize("label", ["-1", "1.5", "9" * 5000], ids=["negative", "fraction", "long"])
def test_labels_that_a_verifier_cannot_have(label: str) -> None:
    with pytest.raises(InputError, match="label must be a non-negative integer"):
        parse_verifier_settings({"label": label})
