"""lm-eval's tasks with images, beside its own `hf-multimodal`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, write_jsonl
from tiny_images import picture, save_tiny_vision_model

from treegen import LLM, InputError, open_run

lm_eval = pytest.importorskip("lm_eval", "0.4")

from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval_tasks import definition  # noqa: E402

from treegen.evals.registry import get_task  # noqa: E402
from treegen.integrations.lm_eval.model import TreegenLM  # noqa: E402
from treegen.report.exchange import export_run, import_log  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_environment")


LOADS = """
from PIL import Image

def images(doc):
    return [Image.open(path).convert("RGB") for path in doc["images"]]
"""
TASK = """
include: {chartqa}
task: local_chartqa
dataset_path: json
dataset_kwargs: {{data_files: {{test: {rows}}}}}
doc_to_image: !function loads.images
doc_to_text: "<image>{{{{query}}}} In short:"
generation_kwargs: {{until: [], do_sample: false, max_gen_toks: 6}}
"""


@pytest.fixture(scope="module", name="model")
def _model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "llava", seed=1)


@pytest.fixture(name="tasks")
def _tasks(tmp_path: Path) -> TaskManager:
    for seed in (1, 2):
        picture(seed).save(tmp_path / f"{seed}.png")
    files = [str(tmp_path / f"{seed}.png") for seed in (1, 2)]
    rows = write_jsonl(
        tmp_path / "rows.jsonl",
        [
            {"query": "What is it?", "label": ["Yes"], "images": files[:1]},
            {"query": "What is beside it?", "label": ["3"], "images": files[:1]},
            {"query": "Which? <image>", "label": ["No"], "images": files},
        ],
    )
    (tmp_path / "loads.py").write_text(LOADS)
    chartqa = definition("chartqa/chartqa.yaml")
    (tmp_path / "task.yaml").write_text(TASK.format(chartqa=chartqa, rows=rows))
    return TaskManager(include_path=str(tmp_path), include_defaults=False)


def answers(model: Any, tasks: TaskManager, **how: Any) -> tuple[list[str], dict[str, Any]]:
    found = lm_eval.simple_evaluate(
        model,
        tasks=["local_chartqa"],
        task_manager=tasks,
        log_samples=True,
        bootstrap_iters=0,
        **how,
    )
    samples = sorted(found["samples"]["local_chartqa"], key=lambda sample: sample["doc_id"])
    return [sample["resps"][0][0] for sample in samples], found["results"]["local_chartqa"]


@pytest.mark.parametrize("chat", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_answers_and_scores_are_those_of_hf_multimodal(
    model: Path, tasks: TaskManager, chat: bool
) -> None:
    own = TreegenLM(str(model), images=True, device="cpu", memory="16MiB")
    texts, scores = answers(own, tasks, apply_chat_template=chat)
    want, expected_scores = answers(
        "hf-multimodal",
        tasks,
        apply_chat_template=chat,
        batch_size=1,
        model_args={"pretrained": str(model), "dtype": "float32", "device": "cpu"},
    )
    assert texts == want
    assert len(set(texts)) == 3
    assert scores == expected_scores
    assert isinstance(own.llm, LLM)
    assert own.llm.engine.encoder_cache is not None
    assert own.llm.engine.encoder_cache.num_encoded == 2


def test_a_model_loaded_for_text_says_what_to_do(model: Path, tasks: TaskManager) -> None:
    own = TreegenLM(str(model), device="cpu", memory="16MiB")
    with pytest.raises(ValueError, match="multimodal"):
        answers(own, tasks)
    with pytest.raises(InputError, match="images=True"):
        from treegen.integrations.lm_eval.conversion import load_images

        load_images(None, {"visual": []})


def test_a_run_of_treegen_draws_the_same_answers(
    model: Path, tasks: TaskManager, tmp_path: Path, treegen: Command
) -> None:
    want, _ = answers(
        TreegenLM(str(model), images=True, device="cpu", memory="16MiB"),
        tasks,
        apply_chat_template=True,
    )
    line = (
        f"eval {tmp_path}/task.yaml --model {model} --device cpu --memory 16MiB"
        " --apply-chat-template"
    )
    done = treegen(line, "--images", "--allow-task-code", "-o", tmp_path / "run")
    assert done.code == 0, done.err
    lines = map(json.loads, (tmp_path / "run" / "samples.jsonl").read_text().splitlines())
    records = sorted(lines, key=lambda record: record["problem_id"])
    assert [record["text"] for record in records] == want
    shown = treegen("show", tmp_path / "run", "--problem", records[2]["problem_id"])
    assert shown.out.count("image: ") == 2

    done = treegen(line, "--allow-task-code", "-o", tmp_path / "text")
    assert done.code == 2 and "the task has images" in done.err and "--images" in done.err


def test_exported_requests_are_those_that_lm_eval_logs(
    model: Path, tasks: TaskManager, tmp_path: Path, treegen: Command
) -> None:
    words = ("--model", model, "--device", "cpu", "--memory", "16MiB", "--temperature", "0.5")
    run = tmp_path / "run"
    done = treegen(
        "eval", tmp_path / "task.yaml", *words, "--images", "--allow-task-code", "-o", run
    )
    assert done.code == 0, done.err
    results, samples = export_run(run, "lm-eval", tmp_path / "log", allow_task_code=True)
    rows = list(map(json.loads, samples.read_text().splitlines()))
    assert len(rows) == 3
    for row in rows:
        (request,) = row["arguments"].values()
        assert request["arg_1"]["temperature"] == 0.5 and request["arg_1"]["do_sample"]
        assert request["arg_2"].keys() == {"visual"}
    (log,) = import_log(results, tmp_path / "back")
    back = open_run(log)
    assert open_run(run, allow_task_code=True).compare(back).differences


def test_tasks_that_cannot_be_run_say_why(model: Path, tasks: TaskManager, tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    whole = file.read_text()
    file.write_text(f"{whole}doc_to_audio: images\n")
    with pytest.raises(InputError, match="uses audio, which is not supported"):
        get_task(str(file))
