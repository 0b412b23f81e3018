"""lm-eval's own tasks on local data: what they include is its definitions, as they are."""

import json
import random
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from treegen.demo import data_path

# Name -> the definition in lm-eval, the split that is asked, and what differs from the definition.
_TASKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "local_gsm8k_cot": ("gsm8k/gsm8k-cot.yaml", "test", {}),
    "local_gsm8k_cot_self_consistency": (
        "gsm8k/gsm8k-cot-self-consistency.yaml",
        "test",
        {"repeats": 8},
    ),
    "local_mmlu": ("mmlu/default/_default_template_yaml", "test", {"num_fewshot": 2}),
    "local_hellaswag": ("hellaswag/hellaswag.yaml", "validation", {"training_split": None}),
    "local_wikitext": (
        "wikitext/wikitext.yaml",
        "test",
        {"training_split": None, "validation_split": None},
    ),
}


def write_tasks(folder: Path, *, limit: int = 6, greedy: bool = False) -> Path:
    """Write the tasks and their data into a folder, for `--include_path`; returns it.

    Args:
        limit: Problems of each task.
        greedy: Make greedy what is drawn at random.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = data_path("words.jsonl").read_text().splitlines()[: limit + 4]
    words = [json.loads(line) for line in lines]
    rng = random.Random(0)
    data = {
        "gsm8k": words[:limit],
        "mmlu": [_multiple_choice(word, rng) for word in words[:limit]],
        "mmlu_dev": [_multiple_choice(word, rng) for word in words[limit:]],
        "hellaswag": [_endings(word, rng) for word in words[:limit]],
        "wikitext": [
            {"page": f" = {word['id']} = \n {word['question']} \n " * (3 * at + 1)}
            for at, word in enumerate(words[:limit])
        ],
    }
    for name, rows in data.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name, (included, split, changes) in _TASKS.items():
        kind = next(kind for kind in data if kind in name)
        files = {split: str(folder / f"{kind}.jsonl")}
        if kind == "mmlu":
            files["dev"] = str(folder / "mmlu_dev.jsonl")
        task: dict[str, Any] = {
            "include": str(definition(included)),
            "task": name,
            "tag": [],
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "datasets")},
            **changes,
        }
        if greedy and "self_consistency" in name:
            until = ["Q:", "\n\n"]
            task["generation_kwargs"] = {"until": until, "do_sample": False, "temperature": 0.0}
        # Every JSON document is a YAML document.
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2))
    return folder


def task_names() -> list[str]:
    """The names of all tasks."""
    return list(_TASKS)


def definition(name: str) -> Path:
    """The file of a definition that comes with lm-eval, such as "piqa/piqa.yaml"."""
    found = find_spec("lm_eval")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "tasks" / name


def _multiple_choice(word: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    right = int(word["answer"].rpartition("#### ")[2])
    choices = [str(right + off) for off in rng.sample(range(-9, 9), 4)]
    answer = rng.randrange(4)
    choices[answer] = str(right)
    return {"question": word["question"], "choices": choices, "answer": answer}


def _endings(word: Mapping[str, Any], rng: random.Random) -> dict[str, Any]:
    steps, _, right = word["answer"].rpartition("\n#### ")
    endings = [f"{steps} [step] So it is {int(right) + off}." for off in rng.sample(range(9), 4)]
    first, _, rest = word["question"].partition(". ")
    return {
        "activity_label": "Sums",
        "ctx_a": f"{first}.",
        "ctx_b": rest.lower(),
        "endings": endings,
        "label": str(rng.randrange(4)),
    }
