"""ARC, HellaSwag, WinoGrande and PIQA against lm-eval's own tasks: same weights, same data."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, samples_of, write_jsonl
from lm_eval_kinds import folder as folder

lm_eval = pytest.importorskip("lm_eval", "0.4")

from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402
from lm_eval_tasks import definition  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_environment")

Row = dict[str, Any]
WORDS = [
    *("river", "number", "Garden", "letter", "window", "42", "don't", "(odd)", "x_y", "a,b"),
    *("caf\u00e9", "na\u00efve", "\u4f60\u597d"),
]


def words(rng: random.Random, low: int, high: int) -> str:
    """Some words, now and then with two spaces between them."""
    gaps = rng.choices((" ", "  "), (9, 1), k=high)
    return "".join(f"{rng.choice(WORDS)}{gap}" for gap in gaps[: rng.randint(low, high)]).strip(" ")


def distinct(rng: random.Random, num: int, make: Callable[[], str]) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < num:
        found[make()] = None
    return list(found)


def odd(rng: random.Random, text: str) -> str:
    """A text that may have spaces around it, which count in lm-eval."""
    return rng.choice(("", "", "", " ")) + text + rng.choice(("", "", "", " ", "\n"))


def arc_row(rng: random.Random) -> Row:
    num = rng.choice((3, 4, 4, 5))
    labels = rng.choice(("ABCDE", "12345"))[:num]
    texts = distinct(rng, num, lambda: odd(rng, words(rng, 1, 6)))
    return {
        "id": f"q{rng.random()}",
        "question": odd(rng, words(rng, 3, 20)),
        "choices": {"text": texts, "label": list(labels)},
        "answerKey": rng.choice(labels),
    }


def hellaswag_row(rng: random.Random) -> Row:
    def marked() -> str:
        mark = rng.choice(("", "", "[substeps] ", " [title] ", " [step]"))
        return f"{words(rng, 1, 4)}{mark}{words(rng, 1, 6)}"

    return {
        "activity_label": words(rng, 1, 3),
        "ctx_a": f"[header] {words(rng, 2, 6)} [title] {words(rng, 2, 9)}",
        "ctx_b": rng.choice(("", words(rng, 1, 4))),
        "endings": distinct(rng, 4, marked),
        "label": str(rng.randrange(4)),
    }


def winogrande_row(rng: random.Random) -> Row:
    first, second = distinct(rng, 2, lambda: words(rng, 1, 2).replace("_", ""))
    before = rng.choice(("", f"{words(rng, 2, 12).replace('_', '')} "))
    after = rng.choice((" ", "'s ", ", "))
    return {
        "sentence": f"{before}_{after}{words(rng, 1, 8)}.{rng.choice(('', ' '))}",
        "option1": first,
        "option2": second,
        "answer": rng.choice("12"),
    }


def piqa_row(rng: random.Random) -> Row:
    solutions = distinct(rng, 2, lambda: odd(rng, words(rng, 1, 9)))
    return {
        "goal": odd(rng, words(rng, 2, 9)),
        "sol1": solutions[0],
        "sol2": solutions[1],
        "label": rng.randrange(2),
    }


# Our name -> how rows are made, lm-eval's definition, and the split that it asks.
TASKS: dict[str, tuple[Callable[[random.Random], Row], str, str]] = {
    "arc-easy": (arc_row, "arc/arc_easy.yaml", "test"),
    "arc-challenge": (arc_row, "arc/arc_challenge.yaml", "test"),
    "hellaswag": (hellaswag_row, "hellaswag/hellaswag.yaml", "validation"),
    "winogrande": (winogrande_row, "winogrande/default.yaml", "validation"),
    "piqa": (piqa_row, "piqa/piqa.yaml", "validation"),
}


def lm_eval_scores(folder: Path, name: str, data: Path, train: Path, shots: int, model: Any) -> Any:
    """What lm-eval's own task makes of the data, by its model `hf`."""
    _, included, split = TASKS[name]
    task: dict[str, Any] = {
        "include": str(definition(included)),
        "task": "local",
        "tag": [],
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {
            "data_files": {split: str(data), "train": str(train)},
            "cache_dir": str(folder / "datasets"),
        },
        "fewshot_split": "train",
        "fewshot_config": {"sampler": "first_n"},
        "num_fewshot": shots,
    }
    if split != "validation":
        task["validation_split"] = None
    if split != "test":
        task["test_split"] = None
    (folder / "local.yaml").write_text(json.dumps(task))
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=model,
        tasks=["local"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
    )
    return found


def compare(
    name: str, num: int, shots: int, checkpoint: Path, folder: Path, command: Command
) -> None:
    """Requests, log-likelihoods, choices and scores are those of lm-eval's task."""
    make, _, _ = TASKS[name]
    rng = random.Random(f"{name} {num}")
    data = write_jsonl(folder / "data.jsonl", [make(rng) for _ in range(num)])
    train = write_jsonl(folder / "train.jsonl", [make(rng) for _ in range(4)])
    model = HFLM(pretrained=str(checkpoint), dtype="float32", device="cpu", batch_size=32)
    want = lm_eval_scores(folder, name, data, train, shots, model)
    out = folder / "run"
    few = ["--num-fewshot", shots, "--fewshot-file", train] if shots else []
    done = command(
        "eval", name, "--data", data, "-M", checkpoint, "--dtype", "float32", "-o", out, *few
    )
    assert done.code == 0 and not done.document["runs"][0]["skipped"]
    scores = {row["metric"]: row["value"] for row in done.document["runs"][0]["report"]["metrics"]}
    expected = {
        metric.removesuffix(",none"): value
        for metric, value in want["results"]["local"].items()
        if metric in ("acc,none", "acc_norm,none")
    }
    assert scores == pytest.approx(expected)
    ours = {record["problem_id"]: record for record in samples_of(out)}
    docs = {sample["doc_id"]: sample for sample in want["samples"]["local"]}
    assert len(ours) == len(docs) == num
    for number, id in enumerate(ids_of(data, name)):
        sample, lls = docs[number], [resp[0] for resp in docs[number]["filtered_resps"]]
        record = ours[id]
        assert record["choice_logprobs"] == pytest.approx(lls, abs=1e-3)
        best = max(range(len(lls)), key=lls.__getitem__)
        context, continuation = sample["arguments"][best]
        assert f"{context}{continuation}".endswith(record["text"])


def ids_of(data: Path, name: str) -> list[str]:
    rows = [json.loads(line) for line in data.read_text("utf-8").split("\n") if line]
    return [row.get("id", f"{name}-{number}") for number, row in enumerate(rows)]


@pytest.mark.parametrize("name", TASKS)
def test_choices_and_scores_are_those_of_lm_eval(
    name: str, tiny: Path, tmp_path: Path, treegen: Command
) -> None:
    compare(name, 24, 2 if name in ("winogrande", "hellaswag") else 0, tiny, tmp_path, treegen)


@pytest.mark.soak
@pytest.mark.parametrize("shots", [0, 3])
@pytest.mark.parametrize("name", TASKS)
def test_a_thousand_questions_are_scored_as_by_lm_eval(
    name: str, shots: int, tiny: Path, tmp_path: Path, treegen: Command
) -> None:
    compare(name, 1000, shots, tiny, tmp_path, treegen)
