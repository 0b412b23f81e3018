"""Methods of a user's own, and the arguments that functions take by name."""

import pickle
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
from cli_cases import write_jsonl
from puzzle_model import ToyLLM, puzzle_model

from treegen.errors import InputError
from treegen.evals.config.base import check_no_unused
from treegen.evals.identity import run_settings
from treegen.evals.search.custom_method import find_method, read_setting_names
from treegen.evals.search.job import SearchJob, load_search_job
from treegen.evals.search.method_types import (
    Argument,
    Count,
    read_signature,
    read_values,
    to_call_values,
)
from treegen.evals.search.run import make_record, run_searches
from treegen.evals.search.searcher import TaskSearch
from treegen.evals.search.settings import (
    SearchSettings,
    resolve_search_settings,
    stored_search_choices,
)
from treegen.runs import SearchRunDir

OWN = """
from typing import Literal

async def lines(root, tools, n: int = 3, how: Literal["few", "many"] = "few", scale: float = 1.0):
    for step in await tools.step(root, n):
        step.value = scale
        if not tools.done(step):
            for end in await step.sample(2, stop=["\\n\\n"]):
                end.value = 1.0

async def whole(root):
    return await root.sample(4)

async def onwards(root, tools, how: str):
    for step in await tools.step(root, 8):
        if tools.is_solved(step):
            if how == "sample":
                await step.sample(2)
            else:
                assert await tools.finish(step, 2) == [step]

async def endless(root):
    while True:
        await root.sample(1)

async def stubborn(root):
    while True:
        try:
            await root.sample(1)
        except Exception:
            pass

async def ends(root, why: str = ""):
    await root.sample(1)
    root.search.stop(why)

async def none(root):
    await root.sample(1)
    return None


async def empty(root):
    await root.sample(1)
    return []


async def wrong(root):
    return 7

def plain(root):
    return root

async def needs(root, n: int):
    return root

async def odd(root, n: dict = {}):
    return root

async def nothing():
    return None
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def settled(own: Path, function: str, **choices: Any) -> SearchSettings:
    settings = {"task": "countdown", "model": "toy", "budget": {"tokens": 900}, "num_fewshot": 1}
    return resolve_search_settings({**settings, "method": f"{own}:{function}", **choices})


def job_of(own: Path, function: str, **choices: Any) -> SearchJob:
    rows = [{"id": f"p{i}", "numbers": [i, 2, 3], "target": i + 5} for i in range(1, 5)]
    data = write_jsonl(own.parent / "puzzles.jsonl", rows)
    return load_search_job(settled(own, function, data=str(data), **choices))


def records_of(job: SearchJob, fn: Any = None) -> list[dict[str, Any]]:
    fn = fn or TaskSearch(job.task, job.data, job.settings)
    llm, roots = ToyLLM(puzzle_model()), list(job.roots.items())
    found = llm.search_stream(
        fn, roots, job.settings.solution, concurrency=1, budget=job.settings.budget
    )
    records = [make_record(job, result) for result in found]
    for record in records:
        del record["time"], record["usage"]["seconds"]
    return records


@pytest.mark.parametrize("function", ["lines", "whole", "endless"])
def test_it_searches_as_methods_that_come_with_treegen(own: Path, function: str) -> None:
    records = records_of(job_of(own, function))
    assert {record["method"] for record in records} == {f"mine.py:{function}"}
    assert all(record["error"] is None for record in records)
    assert sum(record["solved"] for record in records) >= 2
    for record in records:
        assert record["usage"]["tokens_decoded"] <= 900 + 40
        assert record["stopped"] in ("solved", "budget of 900 tokens reached")
    assert records == records_of(job_of(own, function))


@pytest.mark.parametrize("way", ["propose", "step"])
def test_propose_reads_the_options_and_step_does_not(way: str, tmp_path: Path) -> None:
    """With the example of the page on own methods."""
    page = Path(__file__).parents[2] / "docs/search/own-methods.md"
    (text,) = re.findall(r"^```python\n(async def greedy.*?)^```", page.read_text(), re.M | re.S)
    assert "tools.propose(node)" in text and "`await tools.step(node, 2)`" in page.read_text()
    if way == "step":
        text = text.replace("tools.propose(node)", "tools.step(node, 2)")
    path = tmp_path / "mine.py"
    path.write_text(text)
    for expand in (2, 3):
        records = records_of(job_of(path, "greedy", expand=expand))
        assert all(record["error"] is None for record in records)
        assert sum(record["solved"] for record in records) >= 2
        # A puzzle that is not solved is searched again, so that a node has more children.
        children = Counter(
            (at, node["parent_id"], node.get("restart", 0))
            for at, record in enumerate(records)
            for node in record["nodes"]
            if node["parent_id"] is not None
        )
        assert max(children.values()) == (expand if way == "propose" else 2)


def test_the_example_that_reads_the_problem_finds_solutions(tmp_path: Path) -> None:
    page = Path(__file__).parents[2] / "docs/search/own-methods.md"
    (text,) = re.findall(r"^```python\n(import heapq.*?)^```", page.read_text(), re.M | re.S)
    path = tmp_path / "nearest.py"
    path.write_text(text)
    records = records_of(job_of(path, "nearest"))
    assert all(record["error"] is None for record in records)
    assert sum(record["solved"] for record in records) >= 2
    num_valued = 0
    for record in records:
        target = int(record["problem_id"][1:]) + 5  # as in `job_of`
        for node in record["nodes"][1:]:
            numbers = re.findall(r"\(left: ([\d ]+)\)", node["text"])
            is_valued = node["score"] is not None and node["score"] <= 0  # a solution has more
            if is_valued and not node["pruned"]:
                left = map(int, numbers[-1].split())
                assert node["score"] == -min(abs(number - target) for number in left)
                num_valued += 1
    assert num_valued > 4


def test_one_that_takes_the_end_for_a_failure_is_ended(own: Path) -> None:
    (record,) = records_of(job_of(own, "stubborn", limit=1, budget={"calls": 9}))
    assert record["error"] is None and record["stopped"] == "solved"  # by what is in the tree
    assert record["usage"]["calls"] == 9 < len(record["nodes"])


@pytest.mark.parametrize("why", ["interrupted", "left out"])
def test_what_it_says_of_its_end_does_not_lose_its_record(
    own: Path, tmp_path: Path, why: str
) -> None:
    job = job_of(own, "ends", arguments={"why": why}, limit=2)
    settings = run_settings(job, dtype="float32", fingerprint="f")
    with SearchRunDir.create(tmp_path / "run", settings) as run:
        list(run_searches(job, run, ToyLLM(puzzle_model())))  # type: ignore[arg-type]
        assert len(list(run.records())) == 2 and run.missing == 0


@pytest.mark.parametrize("how", ["sample", "finish"])
def test_a_solution_counts_if_the_method_continues_it(own: Path, how: str) -> None:
    puzzle = {"id": "p", "numbers": [2, 3], "target": 5}
    data = write_jsonl(own.parent / "puzzle.jsonl", [puzzle])
    (record,) = records_of(
        load_search_job(settled(own, "onwards", data=str(data), arguments={"how": how}))
    )
    best = record["nodes"][record["best"]]
    assert record["solved"] and record["stopped"] == "solved" and best["depth"] == 1
    assert best["leaf"] == (how == "finish")


SETTINGS = """
async def none(root, width: int = 3):
    return await root.sample(width)

async def some(root, tools, depth: int = 2):
    async def inner(node):
        return await tools.propose(node)
    return await inner(root) or tools.settings.width + tools.settings.depth

async def other(root, tools):
    return await none(root, tools)

async def all_settings(root, tools):
    return vars(tools.settings)

@decorated
async def wrapped(root, tools):
    return None
"""


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        ("none", {"evaluate"}),
        ("some", {"evaluate", "propose", "expand", "width", "depth"}),
        *((name, None) for name in ("other", "all_settings", "wrapped", "absent")),
    ],
)
def test_the_settings_of_a_method_are_read_from_its_code(
    own: Path, function: str, settings: set[str] | None
) -> None:
    own.write_text(SETTINGS)
    assert read_setting_names(f"{own}:{function}") == settings
    assert read_setting_names(f"{own.parent}/absent.py:{function}") is None


def test_settings_that_its_code_does_not_read_are_refused(own: Path) -> None:
    for function, name, message in (
        ("whole", "width", "on mine.py:whole, which does not read tools.settings.width$"),
        ("lines", "expand", "on mine.py:lines, which does not read tools.settings.expand$"),
    ):
        settings = settled(own, function, **{name: 2})
        check_no_unused({"evaluate": "judge"}, [settings])
        with pytest.raises(InputError, match=message):
            check_no_unused({name: 2}, [settings])
    own.write_text(SETTINGS.replace("@decorated", ""))
    with pytest.raises(InputError, match="; pass -a width=VALUE to set its argument"):
        check_no_unused({"width": 2}, [settled(own, "none", width=2)])
    check_no_unused({"width": 2}, [settled(own, "other", width=2)])
    assert settled(own, "none", temperature=0.0).expand == 4  # it does not read this number
    with pytest.raises(InputError, match="temperature 0"):
        settled(own, "some", temperature=0.0)


def test_its_arguments_shape_the_tree(own: Path) -> None:
    for n in (2, 5):
        job = job_of(own, "lines", arguments={"n": str(n)}, limit=1, budget={"calls": 2})
        (record,) = records_of(job)
        assert sum(node["depth"] == 1 for node in record["nodes"]) == n


def test_a_function_that_found_nothing_has_not_failed(own: Path) -> None:
    """`tools.finish` gives [] where nothing came of it, so a function may return that."""
    for name in ("none", "empty"):
        (record, *_) = records_of(job_of(own, name, limit=1, budget={"calls": 2}))
        assert record["error"] is None and not record["solved"]


def test_a_function_that_returns_what_is_no_node_has_failed(own: Path) -> None:
    records = records_of(job_of(own, "wrong"))
    assert all("the search must return a node, a list of nodes" in r["error"] for r in records)


def test_it_can_be_sent_to_workers_that_lack_its_file(own: Path) -> None:
    job = job_of(own, "whole")
    fn = TaskSearch(job.task, job.data, job.settings)
    want = records_of(job, fn)
    sent: Any = fn.__reduce__()
    make, (task, data, settings) = sent
    own.unlink()
    assert pickle.loads(pickle.dumps(settings)) == settings
    assert records_of(job, make(task, data, settings)) == want


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("{own}", "must include the name of a function"),
        ("{own}:line", "has no function 'line'; did you mean 'lines'"),
        (
            "{own}:plain",
            "mine.py:plain is not an async function; write it as `async def plain(root, tools)`",
        ),
        ("{own}:needs", "method mine.py:needs requires the argument n; pass -a n=VALUE"),
        ("{own}:odd", "n of method mine.py:odd has the type dict, which cannot be written as text"),
        ("{own}:nothing", "mine.py:nothing has no argument; add an argument for the root node"),
        ("none.py:solve", "the method's file cannot be read: /.*none.py does not exist"),
        ("baem", "there is no method 'baem'; did you mean 'beam'"),
    ],
)
def test_what_is_no_method_is_refused(own: Path, method: str, message: str) -> None:
    with pytest.raises(InputError, match=message.replace("(", r"\(").replace(")", r"\)")):
        resolve_search_settings(
            {"task": "countdown", "model": "m", "method": method.format(own=own)}
        )


def test_a_file_that_fails_is_refused_in_one_line(own: Path) -> None:
    own.write_text("import os\n1 / 0\n")
    with pytest.raises(InputError, match=r"cannot load .*mine.py: ZeroDivisionError") as caught:
        find_method(f"{own}:lines")
    assert "\n" not in str(caught.value)


def test_a_resume_asks_for_the_same_source_and_arguments(own: Path, tmp_path: Path) -> None:
    job = job_of(own, "lines", arguments={"n": "2"})

    def settings_of(job: SearchJob) -> Any:
        return run_settings(job, dtype="float32", fingerprint="f")

    path = tmp_path / "run"
    with SearchRunDir.create(path, settings_of(job)) as run:
        list(run_searches(job, run, ToyLLM(puzzle_model())))  # type: ignore[arg-type]
        stored = stored_search_choices(run.info)
    assert resolve_search_settings({"allow_task_code": True}, stored) == job.settings
    assert (
        resolve_search_settings({"arguments": {"n": "2"}, "allow_task_code": True}, stored)
        == job.settings
    )

    def refused(**changes: Any) -> str:
        other = load_search_job(
            resolve_search_settings({**changes, "allow_task_code": True}, stored)
        )
        with pytest.raises(Exception, match="search") as caught:
            SearchRunDir.resume(path, settings_of(other))
        return str(caught.value)

    assert "search.arguments.n: 2 -> 3 (arguments=)" in refused(arguments={"n": "3"})
    moved = own.with_name("sub") / own.name
    moved.parent.mkdir()
    moved.write_text(OWN)
    job = load_search_job(resolve_search_settings({"method": f"{moved}:lines"}, stored))
    SearchRunDir.resume(path, settings_of(job)).close()  # the same file in another place
    own.write_text(OWN + "\n")
    assert "(the file of the method has changed)" in refused()
    own.unlink()
    with pytest.raises(InputError, match=r"the method's file cannot be read: .* does not exist"):
        resolve_search_settings({"allow_task_code": True}, stored)


# Arguments


def typed(  # type: ignore[no-untyped-def]
    a: int,
    b: float = 0.5,
    *,
    c: bool = False,
    d: Literal["x", 2] = "x",
    e: "int | None" = None,
    f: tuple[float, ...] = (1.0,),
    g: list[int] | None = None,
    h="text",
    i=3,
    j: Count = 1,
    **rest: Any,
) -> None:
    """Takes arguments of all types."""


def read(function: Callable[..., Any], **given: str) -> dict[str, Any]:
    known = read_signature(function, "it", ())
    return to_call_values(known, read_values(known, given, "it"))


def test_values_are_read_by_their_types() -> None:
    assert read(typed) == {
        "b": 0.5,
        "c": False,
        "d": "x",
        "e": None,
        "f": (1.0,),
        "g": None,
        "h": "text",
        "i": 3,
        "j": 1,
    }
    assert read(typed, b="2", c="yes", d="2", e="-4", f="1,2e-1", g="3, 4", h="", i="5", j="2") == {
        "b": 2.0,
        "c": True,
        "d": 2,
        "e": -4,
        "f": (1.0, 0.2),
        "g": [3, 4],
        "h": "",
        "i": 5,
        "j": 2,
    }
    assert read(typed, e="none", g="None")["g"] is None


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"b": "x"}, "it: b must be a number, got 'x'"),
        ({"b": "nan"}, "it: b must be a number"),
        ({"c": "maybe"}, "it: c must be true or false"),
        ({"d": "3"}, "it: d must be one of x, 2"),
        ({"e": "1.5"}, "it: e must be an integer or none"),
        ({"f": "1,a"}, "it: f must be a number, or several with commas between"),
        ({"j": "0"}, "it: j must be an integer >= 1"),
        ({"cc": "1"}, "it has no argument 'cc'"),
        ({"a": "1"}, "it has no argument 'a'; known: b, c"),
    ],
)
def test_other_values_are_refused(given: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read(typed, **given)


def test_values_that_json_cannot_hold_are_left_to_the_function() -> None:
    known = [Argument("x", float, float("inf")), Argument("y", int, 1)]
    assert read_values(known, {}, "it") == {"y": 1}
