"""Runs of lm-eval's tasks, of all kinds: against lm-eval's own `hf` on the same weights."""

import hashlib
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_cases import build_checkpoint, samples_of
from lm_eval_kinds import folder as folder

lm_eval = pytest.importorskip("lm_eval", "0.4")

import lm_eval_kinds  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

import treegen  # noqa: E402
from treegen import LLM  # noqa: E402

CONTEXT = 320  # longer prompts lose their first tokens, and long texts are scored in windows
OPTIONS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "memory": "64MiB"}
TEMPLATE = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"), context=CONTEXT)


@pytest.fixture(scope="module")
def hf(checkpoint: Path) -> Any:
    return HFLM(pretrained=str(checkpoint), device="cpu", dtype="float32", batch_size=8)


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> LLM:
    return LLM(str(checkpoint), check=False, **OPTIONS)


def by_lm_eval(model: Any, name: str, folder: Path) -> dict[str, Any]:
    """What lm-eval's own command makes of a task."""
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        patch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
        # A resample of few answers may have one label only, which scikit-learn warns of.
        warnings.simplefilter("ignore")
        found: dict[str, Any] = lm_eval.simple_evaluate(
            model=model, tasks=[name], task_manager=manager, bootstrap_iters=2
        )
    return found


def rows_of(report: Any) -> dict[tuple[str, str, str], tuple[float | None, float | None]]:
    return {(row.task, row.metric, row.filter): (row.value, row.stderr) for row in report.metrics}


# One of each kind; the others are as long again.
KINDS = ("arc_easy", "bbh", "lambada", "mmlu", "mmlu_pro", "triviaqa", "wikitext")


@pytest.mark.parametrize(
    "name",
    [
        name if name.removeprefix("local_") in KINDS else pytest.param(name, marks=pytest.mark.soak)
        for name in lm_eval_kinds.names()
    ],
)
def test_scores_and_requests_are_those_of_lm_eval(
    name: str, folder: Path, llm: LLM, hf: Any, tmp_path: Path
) -> None:
    expected = by_lm_eval(hf, name, folder)
    run = treegen.evaluate(
        f"lm-eval:{name}@{folder}",
        llm,
        output=tmp_path / "run",
        progress=False,
        allow_task_code=True,
    )
    report = run.view.report
    assert report is not None
    rows = rows_of(report)
    leaves = expected["group_subtasks"].get(name, [name])
    checked = 0
    for leaf in [name, *leaves]:
        for key, value in expected["results"][leaf].items():
            metric, comma, how = key.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            got, error = rows[leaf, metric, how]
            assert got == pytest.approx(value, rel=1e-4, abs=1e-6), (leaf, key)
            spread = expected["results"][leaf].get(f"{metric}_stderr,{how}")
            if error is not None and spread != "N/A":
                assert error == pytest.approx(spread, abs=1e-6)
            checked += 1
    assert checked
    records = {record["problem_id"]: record for record in samples_of(tmp_path / "run")}
    for leaf in leaves:
        for sample in expected["samples"][leaf]:
            record = records[f"{leaf}/{sample['doc_id']}"]
            responses = sample["resps"]
            if "choice_logprobs" not in record:
                assert record["text"] == responses[0][0]
                room = CONTEXT - sample["arguments"][0][1]["max_gen_toks"]
                tokens = np.array(hf.tok_encode(sample["arguments"][0][0])[-room:], dtype="<i4")
                hashed = hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
                assert record["prompt_hash"] == hashed
                continue
            if isinstance(responses[0][0], float):  # of a whole text
                assert sum(record["choice_logprobs"]) == pytest.approx(responses[0][0], abs=2e-3)
                continue
            want = [each[0][0] for each in responses]
            assert record["choice_logprobs"] == pytest.approx(want, abs=1e-4)
            assert record["choice_greedy"] == [each[0][1] for each in responses]


@pytest.mark.soak
def test_chat_prompts_are_those_of_lm_eval(
    checkpoint: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)
    chatty = tmp_path / "chatty"
    shutil.copytree(checkpoint, chatty)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    names = ["local_gsm8k", "local_arc_easy", "local_winogrande"]
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    model = HFLM(pretrained=str(chatty), device="cpu", dtype="float32", batch_size=8)
    llm = LLM(str(chatty), check=False, **OPTIONS)
    for multiturn in (True, False):
        chat: dict[str, Any] = {
            "apply_chat_template": True,
            "fewshot_as_multiturn": multiturn,
            "system_instruction": "Be brief.",
            "num_fewshot": 2,
        }
        expected = lm_eval.simple_evaluate(
            model=model, tasks=names, task_manager=manager, bootstrap_iters=0, **chat
        )
        for name in names:
            run = treegen.evaluate(
                f"lm-eval:{name}",
                llm,
                output=tmp_path / f"{name}{multiturn}",
                progress=False,
                include_path=folder,
                **chat,
            )
            records = {record["problem_id"]: record for record in samples_of(run.path)}
            for sample in expected["samples"][name]:
                record = records[f"{name}/{sample['doc_id']}"]
                if "choice_logprobs" in record:
                    want = [each[0][0] for each in sample["resps"]]
                    assert record["choice_logprobs"] == pytest.approx(want, abs=1e-4)
                else:
                    assert record["text"] == sample["resps"][0][0]
