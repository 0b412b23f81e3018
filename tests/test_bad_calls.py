"""Whatever a call is given, it raises an error of treegen's, which says what to give."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
from judging_cases import small_run
from report_cases import make_run

import treegen
from treegen import LLM, AsyncLLM, Expand, Node, SamplingParams, evaluate, open_run, search_task
from treegen.errors import InputError, TreegenError
from treegen.evals.config.base import BaseSettings
from treegen.evals.config.eval_settings import EvalSettings, resolve_eval_settings
from treegen.evals.search.settings import SearchSettings, resolve_search_settings
from treegen.evals.task import TaskOptions
from treegen.report.exchange import export_run, import_log
from treegen.search import Budget

BAD: list[Any] = [
    5,
    -1,
    None,
    {},
    [],
    "x",
    3.5,
    object(),
    [5],
    [None],
    {"a": 1},
    10**30,
    b"x",
    [[]],
    ("a",),
    True,
]
ONE = SamplingParams(max_tokens=1)


def load(**options: Any) -> LLM:
    return LLM(**{"model": "demo", "device": "cpu", "memory": "16MiB", "check": False, **options})


async def draw(root: Any) -> None:
    await root.sample(1)


def tree() -> Node:
    return Node("a", samples=1)


CALLS: dict[str, Callable[[Any, Any], object]] = {
    "score": lambda llm, bad: llm.score(bad),
    "a pair": lambda llm, bad: llm.score([bad]),
    "a context": lambda llm, bad: llm.score([(bad, "a")]),
    "a continuation": lambda llm, bad: llm.score([("a", bad)]),
    "skip": lambda llm, bad: list(llm.stream(tree(), ONE, skip=bad)),
    "one of skip": lambda llm, bad: list(llm.stream(tree(), ONE, skip=[bad])),
    "generate": lambda llm, bad: llm.generate(bad, ONE),
    "a prompt": lambda llm, bad: llm.generate([bad], ONE),
    # None and {} are the default parameters, which draw long samples.
    "params": lambda llm, bad: llm.generate(["a"], ONE if bad in (None, {}) else bad),
    "run": lambda llm, bad: llm.run(bad, ONE),
    "plan": lambda llm, bad: llm.plan(bad),
    "AsyncLLM": lambda llm, bad: AsyncLLM(bad),
    "problems": lambda llm, bad: llm.search(draw, bad, ONE),
    "budget": lambda llm, bad: llm.search(draw, ["a"], ONE, budget=bad),
    "session": lambda llm, bad: llm.session(bad).close(),
    "template": lambda llm, bad: llm.generate(["a"], ONE, chat_template_kwargs=bad),
    "tools": lambda llm, bad: llm.generate(["a"], ONE, tools=bad),
}
OPTIONS = (
    "model",
    "dtype",
    "device",
    "memory",
    "impl",
    "sharing",
    "max_rows",
    "page_size",
    "revision",
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return load()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_bad_argument_is_told_of(llm: LLM, name: str) -> None:
    for bad in BAD:
        try:
            CALLS[name](llm, bad)
        except TreegenError:
            pass
        except Exception as error:
            raise AssertionError(f"{name}: {bad!r} raises {type(error).__name__}") from error


@pytest.mark.parametrize("name", OPTIONS)
def test_a_bad_option_is_told_of(name: str) -> None:
    for bad in BAD:
        if bad is None or (bad in (5, True, "x") and name not in ("dtype", "device", "model")):
            continue  # it may be used
        try:
            load(**{name: bad})
        except TreegenError:
            continue
        except Exception as error:
            raise AssertionError(f"{name}: {bad!r} raises {type(error).__name__}") from error


@pytest.mark.parametrize("dtype", [-1, {}, [], 3.5, None, True, "double"])
def test_a_dtype_that_is_none_is_not_taken_for_float32(dtype: Any) -> None:
    with pytest.raises(InputError, match="dtype must be auto or one of"):
        load(dtype=dtype)


WORSE: list[Any] = [
    *BAD,
    float("nan"),
    float("inf"),
    "\ud800",
    "a\0b",
    "b" * 5_000,
    {1},
    range(2),
    len,
    int,
    [{}],
    ("a", 1),
    {"a": None},
    [object()],
    -(10**30),
    1e308,
    2j,
    [True],
    [-1],
    [10**30],
    ["", ""],
]
FEW: list[Any] = [-1, 3.5, "a\0b", {"a": 1}, [object()], 10**30]
AMOUNTS = pytest.mark.parametrize(
    "values", [FEW, pytest.param(WORSE, marks=pytest.mark.soak)], ids=["few", "all"]
)
ASKED: dict[str, Any] = {
    "prompts": ["a"],
    "params": ONE,
    "tree": Node("a", samples=1),
    "prefix": "a",
    "name": "kept",
    "messages": [{"role": "user", "content": "a"}],
    "pairs": [("a", "b")],
    "fn": draw,
    "problems": ["a"],
    "chat_template_kwargs": {},
    "tools": [],
}


def done(found: Any) -> None:
    """Do what a call only begins, and end it."""
    if inspect.isawaitable(found):
        asyncio.run(_awaited(found))
    elif inspect.isasyncgen(found):
        asyncio.run(_all_of(found))
    elif isinstance(found, Iterator):
        list(found)
    if hasattr(found, "close"):
        found.close()


async def _awaited(found: Any) -> None:
    await found


async def _all_of(found: Any) -> None:
    async for _ in found:
        pass


def faults(
    name: str, call: Callable[..., Any], good: dict[str, Any], values: list[Any], *names: str
) -> Iterator[str]:
    """Call with every bad value for every argument, the others good."""
    for argument in names or inspect.signature(call).parameters:
        for bad in values:
            try:
                done(call(**{**good, argument: bad}))
            except TreegenError:
                pass
            except Exception as error:
                yield f"{name}({argument}={bad!r:.60}): {type(error).__name__}: {error!s:.200}"


METHODS = (
    "chat",
    "expand",
    "generate",
    "keep",
    "drop",
    "plan",
    "run",
    "score",
    "score_stream",
    "search",
    "search_stream",
    "session",
    "stream",
)


@AMOUNTS
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_each_argument_of_each_method_of_an_llm(llm: LLM, name: str, values: list[Any]) -> None:
    call = getattr(llm, name)
    llm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    known = inspect.signature(call).parameters
    good = {each: value for each, value in ASKED.items() if each in known}
    if name == "expand":
        good["tree"] = Node("a", expand=[Expand(1, max_tokens=1)])
    # A number of rows that is possible may be as large as memory allows.
    found = list(faults(name, call, good, values, *(each for each in known if each != "progress")))
    for kept, _ in llm.list_prefixes():
        llm.drop(kept)
    assert not found, "\n".join(found)


@AMOUNTS
@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_an_async_llm(values: list[Any]) -> None:
    found: list[str] = []
    with AsyncLLM(load()) as served:
        served.llm.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        for name, good in (
            ("generate", {"prompts": ["a"], "params": ONE}),
            ("encode", {"prompts": ["a"]}),
            ("stream", {"prompts": ["a"], "params": ONE}),
            ("score", {"prompts": [[5, 6]]}),
        ):
            found += faults(name, getattr(served, name), good, values)
        served.check()
    assert not found, "\n".join(found)


@AMOUNTS
@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_what_is_declared(values: list[Any]) -> None:
    found: list[str] = []
    for made in (SamplingParams, Budget):
        found += faults(made.__name__, made, {}, values, *(each.name for each in fields(made)))
    found += faults("Node", Node, {"content": "a"}, values)
    found += faults("Expand", Expand, {"samples": 1}, values)
    assert not found, "\n".join(found)


@AMOUNTS
@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_whole_runs(
    llm: LLM, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    few = {"limit": 1, "max_tokens": 1, "progress": False, "model": llm}
    found: list[str] = []
    both = ("task", "output", "resume", "task_args")
    given: dict[str, Any] = {"task": "gsm8k", "num_samples": 1, **few}
    own = ("sandbox", "num_workers", "limit", "temperature")
    found += faults("evaluate", evaluate, given, values, *both, *own)
    given |= {"task": "countdown", "method": "sample"}
    found += faults("search_task", search_task, given, values, *both, "method", "budget")
    found += faults("open_run", open_run, {"path": "x"}, values)
    made = make_run(tmp_path / "made", num_problems=1, num_samples=2)
    export_run(made, "lm-eval", "log")
    found += faults("export_run", export_run, {"run": made, "to": "lm-eval"}, values)
    found += faults("import_log", import_log, {"log": "log", "path": "new"}, values)
    found += faults("judgings", treegen.judgings, {"run": made}, values)
    arguments = {"run": made, "judge": "nowhere", "progress": False}
    found += faults("judge", treegen.judge, arguments, values, "run", "rubric", "judge", "labels")
    options = ("path", "dtype", "device", "impl", "quantization", "kv_cache_dtype")
    found += faults(
        "load_model", treegen.load_model, {"path": "demo", "check": False}, values, *options
    )
    found += faults("from_module", treegen.from_module, {}, values, "module")
    found += faults("evaluate", evaluate, {"task": "gsm8k", "limit": 1}, values, "model")
    found += faults("Cluster", treegen.Cluster, {"model": "demo", "workers": -1}, values)
    assert not found, "\n".join(found)


@AMOUNTS
@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_judge(
    llm: LLM, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = small_run(tmp_path / "made", problems=1, samples=1)
    arguments: dict[str, Any] = {"run": made, "judge": llm, "progress": False}
    for name in ("listener", "follow", "models"):
        with pytest.raises(InputError, match=f"{name} must be a"):
            treegen.judge(**{**arguments, name: 5})
    found: list[str] = []
    known = [name for name in inspect.signature(treegen.judge).parameters if name != "reading"]
    found += faults("judge", treegen.judge, arguments, values, *known, "data", "task")
    drawn = {**arguments, "verdicts": "samples", "max_tokens": 2}
    of_samples = ("temperature", "max_tokens", "seed", "repeats", "stop_when", "chat", "wordings")
    found += faults("judge of samples", treegen.judge, drawn, values, *of_samples)
    jury = {**arguments, "judge": [llm, "nowhere"]}
    found += faults("judge of a jury", treegen.judge, jury, values, "weights", "combine")
    named = {**arguments, "judge": "demo"}
    found += faults("judge by name", treegen.judge, named, values, "options")
    for options in ({"model": "demo"}, {"dtyp": "auto"}, {"max_rows": "x"}):
        with pytest.raises(InputError):
            treegen.judge(**named, options=options)
    found += faults("judgings", treegen.judgings, {"run": made}, values)
    judged = treegen.judgings(made)
    for each in (judged.needs, judged.needs_json):
        found += faults("needs", each, {}, values, "half_width")
    assert not found, "\n".join(found)


@AMOUNTS
@pytest.mark.filterwarnings("ignore")
def test_each_argument_of_what_a_run_does(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, values: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_run(tmp_path / "made", num_problems=2, num_samples=2)
    run = open_run(made)
    found = list(faults("report", run.report, {}, values, "path"))
    found += faults("compare", run.compare, {"other": made}, values)
    found += faults("open_run", open_run, {"path": made}, values, "data", "task", "allow_task_code")
    assert not found, "\n".join(found)


SETTINGS: list[Any] = [-1, 3.5, "a\0b", {"a": 1}, {5: 5}, [object()], [5], b"x", True]


@pytest.mark.parametrize(
    "settle_", [resolve_eval_settings, resolve_search_settings], ids=["evaluate", "search_task"]
)
def test_each_setting_of_a_run(settle_: Callable[[dict[str, Any]], BaseSettings]) -> None:
    kind, task = (
        (EvalSettings, "gsm8k")
        if settle_ is resolve_eval_settings
        else (SearchSettings, "countdown")
    )
    names = {each.name for made in (kind, TaskOptions, SamplingParams) for each in fields(made)}
    names |= {"verifier", "step_tokens", "place", "sampling_from", "engine", "unknown"}
    found: list[str] = []
    for name in sorted(names):
        found += faults(
            "settle",
            lambda **given: settle_({"model": "demo", **given}),
            {"task": task},
            SETTINGS,
            name,
        )
    assert not found, "\n".join(found)
