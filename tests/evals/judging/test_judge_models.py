"""Which models are loaded for an evaluation that is judged, and when they give memory back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cli_cases import OWN_TASK, Command

import treegen as library
from treegen.evals.judging import pipeline as judges
from treegen.llm import LLM

SMALL = ("--memory", "32MiB", "--max-tokens", "6", "--wordings", "1")
EVAL = ("eval", "gsm8k", "--limit", "2", "-n", "1", "--model", "demo", *SMALL)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What has been loaded and closed, in order."""
    events: list[str] = []
    begin, end = LLM.__init__, LLM.close

    def note(self: LLM, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        events.append(f"load {Path(self.model_info.engine.model).name}")

    def close(self: LLM) -> None:
        events.append(f"close {Path(self.model_info.engine.model).name}")
        end(self)

    monkeypatch.setattr(LLM, "__init__", note)
    monkeypatch.setattr(LLM, "close", close)
    yield events


def test_a_model_that_judges_its_own_samples_is_loaded_once(
    tmp_path: Path, treegen: Command, loaded: list[str]
) -> None:
    done = treegen(*EVAL, "-o", tmp_path / "run", "--judge", "demo").document
    assert done["runs"][0]["judged"]["done"] == 2
    assert loaded == ["load demo", "close demo"]


def test_it_is_also_where_its_numbers_were_chosen(
    tmp_path: Path, treegen: Command, loaded: list[str]
) -> None:
    treegen(*EVAL, "-o", tmp_path / "run", "--judge", "demo", "--dtype", "bfloat16")
    assert loaded == ["load demo", "close demo"]


def test_samples_give_their_memory_back_before_another_judge_is_loaded(
    tmp_path: Path, treegen: Command, tiny: Path, loaded: list[str]
) -> None:
    done = treegen(*EVAL, "-o", tmp_path / "run", "--judge", tiny, "--judge", "demo").document
    assert done["runs"][0]["judged"]["done"] == 4
    name = tiny.name
    assert loaded == [
        "load demo",
        "close demo",
        f"load {name}",
        f"close {name}",
        "load demo",
        "close demo",
    ]


def test_a_judge_of_several_runs_is_loaded_once(
    tmp_path: Path, treegen: Command, tiny: Path, loaded: list[str]
) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "What is 2 + 2?", "answer": "4", "problem": "2 + 2?"}\n')
    done = treegen(
        f"eval jsonl simpleqa --data {data} --model demo -o {tmp_path}/runs --judge {tiny}",
        *("--rubric", "rating"),
        *SMALL,
    ).document
    assert [run["judged"]["done"] for run in done["runs"]] == [1, 1]
    assert loaded == ["load demo", "close demo", f"load {tiny.name}", f"close {tiny.name}"]


def test_all_judges_are_looked_at_before_the_first_is_loaded(no_weights: None) -> None:
    with pytest.raises(library.TreegenError, match="does not exist"):
        judges.resolve_judges(["demo", "none/at/all"], {})


def test_evaluate_judges_with_the_model_that_is_given(loaded: list[str]) -> None:
    how: dict[str, Any] = {"limit": 2, "num_samples": 1, "max_tokens": 6, "progress": False}
    with LLM("demo", device="cpu", memory="32MiB") as llm:
        run = library.evaluate("gsm8k", llm, judge=llm, **how)
        assert library.judgings(run).summaries[0].mean is not None
        assert loaded == ["load demo"]
    run = library.evaluate("gsm8k", "demo", memory="32MiB", judge="demo", **how)
    assert library.judgings(run).summaries[0].mean is not None


def test_a_task_with_code_of_its_own_is_judged_where_it_was_sampled(
    tmp_path: Path, treegen: Command
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(OWN_TASK)
    done = treegen(
        "eval", f"{file}:Echo", "--model", "demo", *SMALL, "-o", tmp_path / "run", "--judge", "demo"
    )
    assert done.document["runs"][0]["judged"]["done"] == 2, done.err
