"""Logs of lm-eval and of Inspect, as those tools write them, made without running a model."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STAMP = "2026-01-02T03-04-05.678901"
Rows = list[dict[str, Any]]


def generated_rows(num: int = 3, filters: Sequence[str] = ("strict", "flexible")) -> Rows:
    """Lines of a task whose answers are generated; every second document is right."""
    return [
        {
            "doc_id": number,
            "doc": {"question": f"What is {number} + 1?", "answer": str(number + 1)},
            "target": str(number + 1),
            "arguments": {"gen_args_0": {"arg_0": f"Q: {number} + 1", "arg_1": {"until": ["Q:"]}}},
            "resps": [[f"It is {number + number % 2}."]],
            "filtered_resps": [str(number + number % 2)],
            "filter": name,
            "metrics": ["exact_match"],
            "doc_hash": "0" * 64,
            "prompt_hash": "1" * 64,
            "target_hash": "2" * 64,
            "exact_match": float(number % 2),
        }
        for name in filters
        for number in range(num)
    ]


def chosen_rows(num: int = 3) -> Rows:
    """Lines of a task whose answers are the most likely of choices."""
    return [
        {
            "doc_id": number,
            "doc": {"query": f"Is {number} even?", "choices": ["yes", "no"]},
            "target": str(number % 2),
            "arguments": {
                f"gen_args_{i}": {"arg_0": f"{number}?", "arg_1": f" {word}"}
                for i, word in enumerate(("yes", "no"))
            },
            "resps": [[["-1.5", "True"]], [["-2.5", "False"]]],
            "filtered_resps": [["-1.5", "True"], ["-2.5", "False"]],
            "filter": "none",
            "metrics": ["acc", "acc_norm", "bits"],
            "acc": float(number % 2 == 0),
            "acc_norm": 1.0,
            "bits": 3.5 + number,
        }
        for number in range(num)
    ]


def exported_rows(num: int = 3, responses: int = 2) -> Rows:
    """Lines as treegen's own export writes them, with a verdict on each response."""
    return [
        {
            "doc_id": number,
            "doc": {"id": f"p{number}", "question": f"{number}?", "answer": "1"},
            "problem_id": f"p{number}",
            "group": "g",
            "target": "1",
            "arguments": {},
            "resps": [[f"text {i}" for i in range(responses)]],
            "filtered_resps": [["1"] * responses],
            "filter": "strict",
            "metrics": ["exact_match"],
            "exact_match": 0.5,
            "by_response": [
                {
                    "index": i,
                    "tokens": 5,
                    "finish_reason": "stop",
                    "answer": str(i),
                    "correct": i == 1,
                    "credit": None,
                }
                for i in range(responses)
            ],
        }
        for number in range(num)
    ]


def results_of(tasks: Sequence[str]) -> dict[str, Any]:
    """What results_TIME.json has."""
    config = {
        "num_fewshot": 2,
        "output_type": "generate_until",
        "repeats": 1,
        "filter_list": [{"name": "strict", "filter": [{"function": "take_first"}]}],
        "generation_kwargs": {
            "until": ["Q:"],
            "do_sample": False,
            "temperature": 0.0,
            "max_gen_toks": 64,
        },
    }
    return {
        "results": {name: {"alias": name} for name in tasks},
        "configs": {name: {"task": name, **config} for name in tasks},
        "versions": dict.fromkeys(tasks, 3.0),
        "n-shot": dict.fromkeys(tasks, 2),
        "model_name": "someone/model",
        "lm_eval_version": "0.4.13",
    }


def write_lm_eval(
    folder: Path,
    tasks: Mapping[str, Rows],
    change: Callable[[dict[str, Any]], None] | None = None,
) -> Path:
    """Write results and samples; returns the results' file.

    Args:
        folder: The folder to write in.
        tasks: The lines of each task.
        change: What to do to the results before they are written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = results_of(list(tasks))
    if change is not None:
        change(results)
    for name, rows in tasks.items():
        text = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / f"samples_{name}_{STAMP}.jsonl").write_text(text)
    path = folder / f"results_{STAMP}.json"
    path.write_text(json.dumps(results, indent=2))
    return path


def inspect_sample(number: int, epoch: int, scores: Mapping[str, Any] | None) -> dict[str, Any]:
    """A sample of an Inspect log. scores: the value of each scorer."""
    message = {"role": "assistant", "content": f"ANSWER: {number}", "source": "generate"}
    return {
        "id": number,
        "epoch": epoch,
        "input": f"What is {number}?",
        "target": str(number),
        "messages": [{"role": "user", "content": f"What is {number}?"}, message],
        "output": {
            "model": "some/model",
            "choices": [{"message": message, "stop_reason": "stop"}],
            "usage": {"input_tokens": 9, "output_tokens": 4, "total_tokens": 13},
        },
        "scores": None
        if scores is None
        else {name: {"value": value, "answer": str(number)} for name, value in scores.items()},
        "completed_at": "2026-01-02T03:04:05+00:00",
    }


def inspect_log(samples: Sequence[Mapping[str, Any]], epochs: int = 1) -> dict[str, Any]:
    """An Inspect log in JSON, without results."""
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "created": "2026-01-02T03:04:05+00:00",
            "task": "asking",
            "task_version": 1,
            "dataset": {"name": "asked", "samples": len(samples)},
            "model": "some/model",
            "model_generate_config": {"temperature": 0.5, "max_tokens": 64},
            "config": {"epochs": epochs},
            "packages": {"inspect_ai": "0.3.285"},
        },
        "plan": {"name": "plan", "steps": [], "config": {}},
        "samples": list(samples),
    }


def write_inspect(path: Path, samples: Sequence[Mapping[str, Any]], epochs: int = 1) -> Path:
    """Write an Inspect log, packed if the path ends in .eval."""
    text = json.dumps(inspect_log(samples, epochs))
    if path.suffix == ".json":
        path.write_text(text)
        return path
    from inspect_ai.log import EvalLog, write_eval_log

    write_eval_log(EvalLog.model_validate_json(text), str(path))
    return path
