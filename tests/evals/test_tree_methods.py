"""The arguments of methods that visit a tree again and again, on puzzles."""

from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl
from puzzle_model import ToyLLM, puzzle_model
from toy_search import ToyModel

from treegen.evals.search.job import load_search_job
from treegen.evals.search.methods import TEXT_METHODS
from treegen.evals.search.run import make_record
from treegen.evals.search.searcher import TaskSearch
from treegen.evals.search.settings import resolve_search_settings
from treegen.search.tree.result import SearchResult

DEFAULTS = {
    "mcts": {
        "batch": 8,
        "virtual": "loss",
        "reward": "leaf",
        "backup": "mean",
        "output": "value",
        "priors": "none",
    },
    "ab-mcts": {"rule": "m", "batch": 4},
    "rstar": {"batch": 8, "checks": 4},
    "self-refine": {
        "rounds": 3,
        "chains": 1,
        "feedback": "Check this answer step by step. If nothing is wrong with it, write DONE.",
        "refine": "Write the whole answer again, improved by this feedback.",
        "enough": "DONE",
    },
}
OTHERS = {
    "mcts": {
        "batch": "2",
        "virtual": "visit",
        "reward": "mean",
        "backup": "max",
        "output": "visits",
        "priors": "likelihood",
    },
    "ab-mcts": {"rule": "a", "batch": "1"},
    "rstar": {"batch": "1", "checks": "1"},
}


def test_defaults_are_part_of_the_settings() -> None:
    for method in TEXT_METHODS:
        settings = resolve_search_settings({"task": "countdown", "model": "m", "method": method})
        assert settings.arguments == DEFAULTS.get(method, {})
        assert settings.identity()["search"].get("arguments", {}) == settings.arguments


@pytest.mark.parametrize("method", OTHERS)
def test_arguments_shape_the_tree(method: str, tmp_path: Path) -> None:
    rows = [{"id": "p", "numbers": [3, 4, 6, 7], "target": 9973}]
    data = write_jsonl(tmp_path / "d.jsonl", rows)

    def found(**arguments: str) -> SearchResult:
        settings: dict[str, Any] = {
            "task": "countdown",
            "data": str(data),
            "model": "toy",
            "num_fewshot": 1,
            "method": method,
            "budget": {"calls": 50},
            "arguments": arguments,
            "evaluate": "logprob",
            "exploration": 0.1,
            "rollouts": 0,
        }
        job = load_search_job(resolve_search_settings(settings))
        fn = TaskSearch(job.task, job.data, job.settings)
        (result,) = ToyLLM(puzzle_model(mistakes=0.0)).search_stream(
            fn,
            list(job.roots.items()),
            job.settings.solution,
            concurrency=1,
            budget=job.settings.budget,
        )
        assert result.error is None
        return result

    plain = found()
    # What comes first plays no part while nothing is solved; nor do checks.
    changed = {
        name for name, value in OTHERS[method].items() if found(**{name: value}).tree != plain.tree
    }
    assert "batch" in changed and not changed & {"output", "checks"}
    assert found(**OTHERS[method]).tree.nodes


# Self-refine


def refining_model(texts: dict[str, str]) -> ToyModel:
    """Continues a text by the answer to the last of some endings; a digit after a colon."""
    letters = "".join(
        sorted({letter for pair in texts.items() for text in pair for letter in text})
    )

    def weights(text: str) -> list[float]:
        at, ending = max((text.rfind(ending), ending) for ending in texts)
        typed, whole = text[at + len(ending) :], texts[ending]
        following = whole[len(typed)] if whole.startswith(typed) and whole != typed else ""
        return [float(not following), *(float(letter == following) for letter in letters)]

    return ToyModel(letters, weights)


def refine(tmp_path: Path, texts: dict[str, str], **choices: Any) -> dict[str, Any]:
    row = {"question": "How many?", "answer": "#### 7"}
    settings = {
        "task": "gsm8k",
        "data": str(write_jsonl(tmp_path / "words.jsonl", [row])),
        "model": "toy",
        "num_fewshot": 0,
        "method": "self-refine",
        "budget": {"tokens": 900},
        **choices,
    }
    job = load_search_job(resolve_search_settings(settings))
    (result,) = ToyLLM(refining_model(texts)).search_stream(
        TaskSearch(job.task, job.data, job.settings),
        list(job.roots.items()),
        job.settings.solution,
        concurrency=1,
        budget=job.settings.budget,
    )
    return make_record(job, result)


def test_self_refine_answers_with_its_last_attempt_alone(tmp_path: Path) -> None:
    texts = {"A:": " The answer is 3.", "wrong?\n": "Much.", "again.\n": "The answer is 7."}
    words = {"feedback": "wrong?", "refine": "again.", "enough": "right"}
    record = refine(tmp_path, texts, arguments={**words, "rounds": "2"})
    assert (record["text"], record["answer"], record["solved"]) == ("The answer is 7.", "7", True)
    drawn = [node["text"] for node in record["nodes"][1:]]
    assert drawn == [
        " The answer is 3.",
        *("\n\nwrong?\n", "Much.", "\n\nagain.\n", "The answer is 7.") * 2,
    ]
    assert record["error"] is None and not record["stopped"]


def test_self_refine_stops_when_feedback_says_enough(tmp_path: Path) -> None:
    texts = {"A:": " The answer is 3.", "wrong?\n": "It is right.", "again.\n": "The answer is 7."}
    words = {"feedback": "wrong?", "refine": "again.", "enough": "right"}
    record = refine(tmp_path, texts, arguments={**words, "chains": "2"})
    assert (record["answer"], record["usage"]["calls"]) == ("3", 4)
    assert [record["nodes"][node]["text"] for node in record["candidates"]] == [
        " The answer is 3."
    ] * 2
    with_nothing = refine(tmp_path, texts, arguments={**words, "enough": ""})
    assert "enough must not be empty" in with_nothing["error"]


def test_self_refine_ends_with_a_solved_puzzle(tmp_path: Path) -> None:
    data = write_jsonl(tmp_path / "d.jsonl", [{"id": "p", "numbers": [2, 2], "target": 4}])
    texts = {
        "Steps:\n": "2 + 2 = 5 (left: 5)\n",
        "wrong?\n": "The sum.",
        "again.\n": "2 + 2 = 4 (left: 4)\n",
    }
    words = {"feedback": "wrong?", "refine": "again.", "rounds": "5"}
    record = refine(tmp_path, texts, task="countdown", data=str(data), arguments=words)
    assert record["solved"] and record["stopped"] == "solved"
    assert record["text"] == "2 + 2 = 4 (left: 4)\n"
    assert record["usage"]["calls"] == 3
