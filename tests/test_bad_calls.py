"""Whatever a call is given, it raises an error of treegen's, which says what to give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from treegen import LLM, AsyncLLM, Node, SamplingParams
from treegen.errors import InputError, TreegenError

BAD: list[Any] = [
    5, -1, None, {}, [], "x", 3.5, object(), [5], [None], {"a": 1}, 10**30, b"x", [[]], ("a",), True
]  # fmt: skip
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
    "params": lambda llm, bad: llm.generate(["a"], bad),
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
    "model", "dtype", "device", "memory", "impl", "sharing", "max_rows", "page_size", "revision",
)  # fmt: skip


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


@pytest.mark.parametrize("dtype", [-1, {}, [], 3.5, None, True, "float"])
def test_a_dtype_that_is_none_is_not_taken_for_float32(dtype: Any) -> None:
    with pytest.raises(InputError, match="dtype must be auto or one of"):
        load(dtype=dtype)
