"""A metric that a task asks for by name is no program of the folder where the command runs."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", "0.4")

from treegen.errors import InputError, TreegenError
from treegen.evals.registry import get_task
from treegen.tasks.lm_eval.load import load_tasks

HOSTILE = "from pathlib import Path\nPath('ran').touch()\n"


@pytest.mark.parametrize("metric", [{"metric": "f9", "hf_evaluate": True}, {"metric": "f9"}])
def test_a_folder_named_like_a_metric_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metric: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data.jsonl").write_text('{"q": "1+1?", "a": "2"}\n')
    task = {
        "task": "sums",
        "dataset_path": "json",
        "output_type": "generate_until",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "data.jsonl")}},
        "test_split": "test",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "metric_list": [{**metric, "aggregation": "mean", "higher_is_better": True}],
    }
    (tmp_path / "sums.yaml").write_text(json.dumps(task))
    (tmp_path / "f9").mkdir()
    (tmp_path / "f9" / "f9.py").write_text(HOSTILE)
    load_tasks.cache_clear()
    with pytest.raises(InputError, match=r"metric f9, but lm-eval would run"):
        get_task(str(tmp_path / "sums.yaml"))
    assert not (tmp_path / "ran").exists()


def test_nor_if_a_function_of_the_task_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("evaluate")
    place = tmp_path / "elsewhere"
    place.mkdir()
    (place / "data.jsonl").write_text('{"q": "1+1?", "a": "2"}\n')
    (place / "utils.py").write_text(
        "import evaluate\nf8 = evaluate.load('f8')\ndef score(**_): ...\n"
    )
    (place / "sums.yaml").write_text(
        f"task: sums_asking\ndataset_path: json\noutput_type: generate_until\n"
        f"dataset_kwargs:\n  data_files: {{test: {place}/data.jsonl}}\ntest_split: test\n"
        "doc_to_text: '{{q}}'\ndoc_to_target: '{{a}}'\nmetric_list:\n"
        "  - {metric: !function utils.score, aggregation: mean, higher_is_better: true}\n"
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f8").mkdir()
    (tmp_path / "f8" / "f8.py").write_text(HOSTILE)
    load_tasks.cache_clear()
    with pytest.raises(TreegenError, match=r"metric f8, but lm-eval would run"):
        get_task(str(place / "sums.yaml"))
    assert not (tmp_path / "ran").exists()
