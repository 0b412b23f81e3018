"""More than twenty of lm-eval's own tasks, of all kinds, on local data in their own columns."""

import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from cli_cases import write_jsonl
from lm_eval_tasks import definition

Row = dict[str, Any]
_WORDS: Final = (
    *("river", "number", "Garden", "letter", "window", "42", "don't", "(odd)", "x_y", "a,b", "7"),
    *("caf\u00e9", "na\u00efve", "Paris", "True"),
)


def _text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choices(_WORDS, k=rng.randint(low, high)))


def _different(rng: random.Random, num: int, low: int = 1, high: int = 5) -> list[str]:
    found: dict[str, None] = {}
    while len(found) < num:
        found[_text(rng, low, high)] = None
    return list(found)


def _gsm8k(rng: random.Random) -> Row:
    number = rng.randint(0, 99)
    return {"question": _text(rng, 4, 12), "answer": f"{_text(rng, 2, 6)}\n#### {number}"}


def _arc(rng: random.Random) -> Row:
    num = rng.choice((3, 4, 5))
    labels = list("ABCDE"[:num])
    return {
        "id": str(rng.random()),
        "question": _text(rng, 3, 12),
        "question_stem": _text(rng, 3, 12),
        "choices": {"text": _different(rng, num), "label": labels},
        "answerKey": rng.choice(labels),
    }


def _hellaswag(rng: random.Random) -> Row:
    return {
        "activity_label": _text(rng, 1, 2),
        "ctx_a": f"{_text(rng, 2, 6)} [title] {_text(rng, 2, 6)}.",
        "ctx_b": _text(rng, 1, 3),
        "endings": _different(rng, 4, 2, 6),
        "label": str(rng.randrange(4)),
    }


def _winogrande(rng: random.Random) -> Row:
    first, second = (each.replace("_", "") for each in _different(rng, 2, 1, 2))
    return {
        "sentence": f"{_text(rng, 2, 8).replace('_', '')} _ {_text(rng, 1, 6)}.",
        "option1": first,
        "option2": f"{second} too",
        "answer": rng.choice("12"),
    }


def _piqa(rng: random.Random) -> Row:
    first, second = _different(rng, 2, 1, 8)
    return {"goal": _text(rng, 2, 8), "sol1": first, "sol2": second, "label": rng.randrange(2)}


def _mmlu(rng: random.Random) -> Row:
    return {
        "question": _text(rng, 3, 9),
        "choices": _different(rng, 4),
        "answer": rng.randrange(4),
    }


def _boolq(rng: random.Random) -> Row:
    return {
        "passage": _text(rng, 9, 20),
        "question": _text(rng, 3, 8),
        "label": rng.randrange(2),
    }


def _truthfulqa(rng: random.Random) -> Row:
    labels = [1, *(rng.randrange(2) for _ in range(rng.randint(1, 3))), 0]
    return {
        "question": _text(rng, 3, 8),
        "mc1_targets": {"choices": _different(rng, 3), "labels": [1, 0, 0]},
        "mc2_targets": {"choices": _different(rng, len(labels)), "labels": labels},
    }


def _lambada(rng: random.Random) -> Row:
    return {"text": _text(rng, 8, 20)}


def _wikitext(rng: random.Random) -> Row:
    return {"page": f" = {_text(rng, 1, 3)} = \n {_text(rng, 10, 200)} \n"}


def _drop(rng: random.Random) -> Row:
    nothing = {"number": "", "date": {"day": "", "month": "", "year": ""}, "spans": [""]}
    number = {**nothing, "number": str(rng.randint(0, 9)), "spans": ["none"]}
    spans = {**nothing, "spans": _different(rng, 2, 1, 2)}
    return {
        "query_id": str(rng.random()),
        "passage": _text(rng, 9, 20),
        "question": _text(rng, 3, 8),
        "answer": rng.choice((number, spans)),
        "validated_answers": {
            "number": ["3"],
            "date": [nothing["date"]],
            "spans": [["none"]],
        },
    }


def _triviaqa(rng: random.Random) -> Row:
    aliases = _different(rng, rng.randint(2, 4), 1, 2)
    return {"question": _text(rng, 3, 8), "answer": {"aliases": aliases, "value": aliases[0]}}


def _bbh(rng: random.Random) -> Row:
    return {"input": f"not {rng.choice(('True', 'False'))} is", "target": "True"}


def _mmlu_pro(rng: random.Random) -> Row:
    options = _different(rng, rng.choice((4, 10)))
    index = rng.randrange(len(options))
    return {
        "question": _text(rng, 3, 9),
        "options": options,
        "answer": "ABCDEFGHIJ"[index],
        "answer_index": index,
        "cot_content": f"A: Let's think step by step. {_text(rng, 3, 6)} The answer is (B).",
        "category": "business",
    }


def _aime(rng: random.Random) -> Row:
    return {"problem": _text(rng, 4, 12), "answer": str(rng.randrange(1000))}


def _ifeval(rng: random.Random) -> Row:
    return {
        "key": rng.randrange(9999),
        "prompt": _text(rng, 4, 12),
        "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
        "kwargs": [{}, {"num_words": rng.randint(1, 40), "relation": "at least"}],
    }


def _squad(rng: random.Random) -> Row:
    return {"text": f"{_text(rng, 9, 20)} ", "value": _text(rng, 1, 1)}


def _copa(rng: random.Random) -> Row:
    first, second = _different(rng, 2, 2, 5)
    return {
        "premise": f"{_text(rng, 3, 8)}.",
        "choice1": first,
        "choice2": second,
        "question": rng.choice(("cause", "effect")),
        "label": rng.randrange(2),
    }


def _race(rng: random.Random) -> Row:
    problems = [
        {"question": _text(rng, 2, 6), "answer": rng.choice("ABCD"), "options": _different(rng, 4)}
        for _ in range(2)
    ]
    return {"article": _text(rng, 9, 30), "problems": repr(problems)}


def _sciq(rng: random.Random) -> Row:
    a, b, c, d = _different(rng, 4, 1, 2)
    return {
        "support": _text(rng, 3, 9),
        "question": _text(rng, 3, 9),
        "distractor1": a,
        "distractor2": b,
        "distractor3": c,
        "correct_answer": d,
    }


def _mathqa(rng: random.Random) -> Row:
    numbers = rng.sample(range(100), 5)
    options = " , ".join(f"{name} ) {n}" for name, n in zip("abcde", numbers, strict=True))
    return {"Problem": _text(rng, 4, 9), "options": options, "correct": rng.choice("abcde")}


def _sst2(rng: random.Random) -> Row:
    return {"sentence": _text(rng, 3, 9), "label": rng.randrange(2), "idx": rng.randrange(99)}


def _cola(rng: random.Random) -> Row:
    return _sst2(rng)


def _cb(rng: random.Random) -> Row:
    return {"premise": _text(rng, 3, 9), "hypothesis": _text(rng, 2, 5), "label": rng.randrange(3)}


# Name -> lm-eval's definition, how rows are made, the split that is asked, the split of examples,
# and what differs from the definition.
TASKS: Final[Mapping[str, tuple[str, Callable[[random.Random], Row], str, str, Row]]] = {
    "gsm8k": ("gsm8k/gsm8k.yaml", _gsm8k, "test", "train", {"num_fewshot": 2}),
    "gsm8k_cot": ("gsm8k/gsm8k-cot.yaml", _gsm8k, "test", "train", {"num_fewshot": 2}),
    "arc_easy": ("arc/arc_easy.yaml", _arc, "test", "train", {"validation_split": None}),
    "hellaswag": ("hellaswag/hellaswag.yaml", _hellaswag, "validation", "train", {}),
    "winogrande": ("winogrande/default.yaml", _winogrande, "validation", "train", {}),
    "piqa": ("piqa/piqa.yaml", _piqa, "validation", "train", {}),
    "boolq": ("super_glue/boolq/default.yaml", _boolq, "validation", "train", {}),
    "truthfulqa_mc1": ("truthfulqa/truthfulqa_mc1.yaml", _truthfulqa, "validation", "", {}),
    "truthfulqa_mc2": ("truthfulqa/truthfulqa_mc2.yaml", _truthfulqa, "validation", "", {}),
    "lambada": ("lambada/lambada_openai.yaml", _lambada, "test", "", {}),
    "wikitext": (
        "wikitext/wikitext.yaml",
        _wikitext,
        "test",
        "",
        {"training_split": None, "validation_split": None},
    ),
    "drop": ("drop/default.yaml", _drop, "validation", "train", {}),
    "triviaqa": ("triviaqa/default.yaml", _triviaqa, "validation", "train", {}),
    "bbh": ("bbh/cot_fewshot/boolean_expressions.yaml", _bbh, "test", "", {}),
    "ifeval": ("ifeval/ifeval.yaml", _ifeval, "train", "", {}),
    "copa": ("super_glue/copa/default.yaml", _copa, "validation", "train", {}),
    "openbookqa": ("openbookqa/openbookqa.yaml", _arc, "test", "train", {"validation_split": None}),
    "race": ("race/race.yaml", _race, "test", "", {}),
    "sciq": ("sciq/sciq.yaml", _sciq, "test", "train", {"validation_split": None}),
    "mathqa": ("mathqa/mathqa.yaml", _mathqa, "test", "train", {"validation_split": None}),
    "cola": ("glue/cola/default.yaml", _cola, "validation", "train", {}),
    "cb": ("super_glue/cb/default.yaml", _cb, "validation", "train", {}),
    "stem": ("mmlu/default/_default_template_yaml", _mmlu, "test", "dev", {"num_fewshot": 2}),
    "arts": ("mmlu/default/_default_template_yaml", _mmlu, "test", "dev", {"num_fewshot": 2}),
    "bbh_zeroshot": (
        "bbh/cot_zeroshot/web_of_lies.yaml",
        _bbh,
        "test",
        "",
        {},
    ),
    "mmlu_pro": (
        "mmlu_pro/mmlu_pro_business.yaml",
        _mmlu_pro,
        "test",
        "validation",
        {"num_fewshot": 2},
    ),
    "aime25": ("aime/aime25.yaml", _aime, "test", "", {"training_split": None}),
}
SIZES: Final = {"stem": 3, "arts": 5, "wikitext": 2, "race": 3}
_SQUAD: Final = """
from lm_eval.tasks.squad_completion.task import SQUADCompletion

class Local(SQUADCompletion):
    DATASET_PATH = {folder!r}
"""


def names() -> list[str]:
    """The names of all tasks, and of the group."""
    alone = [f"local_{name}" for name in TASKS if name not in ("stem", "arts")]
    return [*alone, "local_squad", "local_mmlu"]


def write_kinds(folder: Path, *, most_tokens: int = 24) -> Path:
    """Write all tasks and their data into a folder; returns it.

    Args:
        most_tokens: Of answers that are drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(38)
    for name, (included, make, split, shots, changes) in TASKS.items():
        files = {split: [make(rng) for _ in range(SIZES.get(name, 4))]}
        if shots:
            files[shots] = [make(rng) for _ in range(4)]
        made = {each: folder / f"{name}_{each}.jsonl" for each in files}
        for each, rows in files.items():
            write_jsonl(made[each], rows)
        data = {each: str(path) for each, path in made.items()}
        task: Row = {
            "include": str(definition(included)),
            "task": f"local_{name}",
            "tag": [],
            "dataset_path": "json",
            "dataset_name": None,
            "dataset_kwargs": {"data_files": data, "cache_dir": str(folder / "datasets")},
            **({} if shots else {"training_split": None}),
            **changes,
        }
        if make in (_gsm8k, _bbh, _ifeval, _triviaqa, _drop, _mmlu_pro, _aime):
            task["generation_kwargs"] = {
                "until": {"ifeval": [], "drop": ["."], "triviaqa": ["\n", ".", ","]}.get(
                    name, ["Question:", "Q", "\n\n"]
                ),
                "do_sample": False,
                "max_gen_toks": most_tokens,
            }
        (folder / f"{name}.yaml").write_text(json.dumps(task, indent=2))
    squad = folder / "squad"
    squad.mkdir(exist_ok=True)
    write_jsonl(squad / "validation.jsonl", [_squad(rng) for _ in range(3)])
    (folder / "local_squad.py").write_text(_SQUAD.format(folder=str(squad)))
    (folder / "squad.yaml").write_text("task: local_squad\nclass: !function local_squad.Local\n")
    (folder / "mmlu.yaml").write_text(
        "group: local_mmlu\ntask:\n  - local_stem\n  - local_arts\n"
        "aggregate_metric_list:\n  - metric: acc\n    weight_by_size: true\n"
        "metadata:\n  version: 2\n"
    )
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of lm-eval, one of each kind."""
    return write_kinds(tmp_path_factory.mktemp("tasks"))
