"""The arguments of methods that visit a tree again and again, on puzzles."""

from pathlib import Path
from typing import Any

import pytest
from cli_cases import write_jsonl
from puzzle_model import ToyLLM, puzzle_model

from treegen.evals.search.job import load_search_job
from treegen.evals.search.methods import METHODS
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
    for method in METHODS:
        settings = resolve_search_settings({"task": "countdown", "model": "m", "method": method})
        assert settings.arguments == DEFAULTS.get(method, {})
        assert settings.identity()["search"].get("arguments", {}) == settings.arguments


@pytest.mark.parametrize("method", OTHERS)
def test_arguments_shape_the_tree(method: str, tmp_path: Path) -> None:
    rows = [{"id": "p", "numbers": [3, 4, 6, 7], "target": 9973}]
    data = write_jsonl(tmp_path / "d.jsonl", rows)

    def found(**arguments: str) -> SearchResult:
        asked: dict[str, Any] = {
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
        job = load_search_job(resolve_search_settings(asked))
        fn = TaskSearch(job.task, job.data, job.settings)
        (result,) = ToyLLM(puzzle_model(mistakes=0.0)).search_stream(
            fn,
            list(job.roots.items()),
            job.settings.whole,
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
