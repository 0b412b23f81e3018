"""What an evaluation was asked for, taken apart for run.json and put together again."""

import json
from dataclasses import replace
from typing import Any

from treegen.evals.settings import EvalSettings, settle


def identity_of(settings: EvalSettings) -> dict[str, Any]:
    """The choices that change a sample, as a run directory gives them back."""
    found: dict[str, Any] = json.loads(json.dumps(settings.identity()))
    return found


def test_what_a_task_does_to_its_draws_is_compared_and_comes_back() -> None:
    plain = settle({"task": "gsm8k", "model": "m"})
    own = replace(plain.sampling, min_tokens=8, logit_bias={5: 2.5, 3: -1.0})
    before, now = identity_of(plain), identity_of(replace(plain, sampling=own))
    # A run that sets neither is what it was before there were such settings.
    assert not {"min_tokens", "logit_bias"} & set(before["sampling"])
    assert now["sampling"]["min_tokens"] == 8
    assert now["sampling"]["logit_bias"] == {"5": 2.5, "3": -1.0}

    stored = {"task": "gsm8k", "model": "m", **now["sampling"], **now["prompt"]}
    again = settle({}, {"fewshot_as_multiturn": False, **stored})
    assert again.sampling.min_tokens == 8 and dict(again.sampling.biases) == {5: 2.5, 3: -1.0}
    assert identity_of(again) == now
