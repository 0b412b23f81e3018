"""Messages of errors: what is wrong, by the name that was given, and what to do."""

import copy
import inspect
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import Command
from report_cases import make_run, make_search_run

from treegen import LLM, InputError, Node, SamplingParams
from treegen.errors import ModelError
from treegen.evals.registry import get_task
from treegen.evals.statistics.estimators import estimate
from treegen.llm.cluster.placement import parse_placement
from treegen.model.config import resolve_device
from treegen.model.options import EngineOptions
from treegen.model.scorers.heads import slice_head
from treegen.ops.attention import Level
from treegen.search.reward import load_verifier


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("best_of", "has no 'best_of'; set n to the number of samples to draw, and sort"),
        ("max_new_tokens", "did you mean max_tokens=?"),
        ("temprature", "did you mean temperature=?"),
        ("xyzzy", "SamplingParams has no 'xyzzy'; .* lists all parameters"),
    ],
)
def test_an_unknown_sampling_parameter(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        SamplingParams(**{name: 3})  # type: ignore[arg-type]


def test_sampling_parameters_are_a_dataclass_as_before() -> None:
    params = SamplingParams(temperature=0.5, stop=("a",), logit_bias={3: 1.0})
    for again in (replace(params), copy.deepcopy(params), pickle.loads(pickle.dumps(params))):
        assert again == params
    assert "temperature" in inspect.signature(SamplingParams).parameters
    with pytest.raises(TypeError, match="positional"):
        SamplingParams(0.5)  # type: ignore[call-arg]


def test_an_id_that_no_sampled_node_has() -> None:
    llm = LLM("demo", memory="16MiB")
    tree = Node("Q:", children=[Node(" 2", id="two"), Node(" 3", children=[Node("+"), Node("-")])])
    params = SamplingParams(max_tokens=2)
    result = llm.run(tree, params)
    assert [len(result.of(name)) for name in ("two", "0/1/0", "0/1/1")] == [1, 1, 1]
    ids = "the ids are 'two', '0/1/0', '0/1/1'"
    unknown: list[tuple[Any, str]] = [
        ("twi", "; did you mean 'two'"),
        ("0/1", ""),
        (0, "; use one of the ids$"),
    ]
    for name, near in unknown:
        with pytest.raises(InputError, match=f"no sampled node has the id {name!r}; {ids}.*{near}"):
            result.of(name)
    with (
        llm.stream(tree, params) as stream,
        pytest.raises(InputError, match=f"no sampled node has the id 'x'; {ids}"),
    ):
        stream.cancel("x")
    many = llm.run(Node("a", children=[Node(str(i)) for i in range(10)]), params)
    with pytest.raises(InputError, match="'0/7' and 2 more; use one of the ids"):
        many.of("zzz")
    without = llm.run(Node("a", children=[Node("b"), Node("c", samples=0)]), params)
    assert without.of("0/0")


def test_tags_of_reasoning() -> None:
    with pytest.raises(InputError, match="'<a></a>' contains the closing tag '</a>'"):
        SamplingParams(reasoning_tags=("<a></a>", "</a>"))


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(InputError, match=r"cuda:3 does not exist; choose one of cuda:0, cuda:1$"):
        resolve_device("cuda:3")


# Builds of torch for GPUs read a number as a GPU, others as an error.
@pytest.mark.parametrize("wrong", [0, 5, -1, True, 1.5, b"cpu", ["cpu"], torch.cpu])
def test_a_device_is_named_by_text_or_by_a_device_of_torch(wrong: Any, tmp_path: Path) -> None:
    row = torch.zeros(1, dtype=torch.int32)
    calls: dict[str, Callable[[], object]] = {
        "resolve_device": lambda: resolve_device(wrong),
        "EngineOptions": lambda: EngineOptions(model="demo", device=wrong),
        "LLM": lambda: LLM("demo", device=wrong),
        "parse_placement": lambda: parse_placement(workers=1, device=wrong),
        "load_verifier": lambda: load_verifier(tmp_path, device=wrong),
        "Level.dense": lambda: Level.dense(row, row, row, device=wrong),
    }
    for name, call in calls.items():
        with pytest.raises(InputError, match="device must be auto, cpu, cuda or cuda:N, got "):
            pytest.fail(f"{name} takes {call()!r}")


def test_a_device_of_torch_is_a_device() -> None:
    cpu: Any = torch.device("cpu")
    assert resolve_device(cpu) == cpu and EngineOptions(model="demo", device=cpu).device == "cpu"
    assert parse_placement(workers=1, device=cpu).device == "cpu"
    row = torch.zeros(1, dtype=torch.int32)
    assert Level.dense(row, row, row, device=cpu).q_start_G.device == cpu


def test_an_estimate_names_the_value() -> None:
    with pytest.raises(InputError, match=r"values from 0 to 1, one for each problem; got 1\.5"):
        estimate([0.5, 1.5])


def test_a_head_without_a_matrix() -> None:
    with pytest.raises(ModelError, match="head, Identity, has no weight matrix"):
        slice_head(torch.nn.Identity(), [1])


def test_runs_of_the_other_command(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=1, num_samples=1)
    searched = make_search_run(tmp_path / "searched", num_problems=1)
    assert "treegen eval" in treegen("search", "--resume", run).error
    assert "treegen search" in treegen("eval", "--resume", searched).error


def test_a_task_that_is_no_class(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text("T = 3\n")
    with pytest.raises(InputError, match="must be the class of a task, got 3"):
        get_task(f"{tmp_path / 't.py'}:T")
