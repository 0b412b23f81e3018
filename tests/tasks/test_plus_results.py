"""Thousands of drawn results, judged as EvalPlus compares them in the program's own process."""

import random
from collections.abc import Sequence
from decimal import Decimal
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest

from treegen.tasks.code.calls import PRELUDE, CallValue, build_expected, is_expected
from treegen.tasks.code.humaneval import HumanEval
from treegen.tasks.code.plus import HumanEvalPlus
from treegen.tasks.sandbox import ProgramStatus, SandboxPool, value_json

NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "3",
    "7",
    "10",
    "255",
    "256",
    "300",
    "65504",
    "70000",
    "2**31",
    "2**53",
    "2**53+1",
    "2**62",
    "10**20",
    "True",
    "False",
    "0.0",
    "-0.0",
    "0.1",
    "0.5",
    "1/3",
    "2/3",
    "1.5",
    "3.14159",
    "1e-9",
    "1e-5",
    "0.1+1e-9",
    "0.1+1e-5",
    "12345.678",
    "1e10",
    "1e300",
    "float('inf')",
    "2.0**53",
    "1+0j",
    "0.1+2j",
)
TYPES = (
    "np.float16",
    "np.float32",
    "np.float64",
    "np.longdouble",
    "np.complex64",
    "np.complex128",
    "np.int8",
    "np.uint8",
    "np.int16",
    "np.uint16",
    "np.int32",
    "np.int64",
    "np.uint64",
    "np.bool_",
    "Fraction",
    "Decimal",
    "float",
    "int",
    "complex",
)
OTHERS = ("''", "'a'", "'ab'", "None", "np.str_('a')")


def number(draw: random.Random) -> str:
    """Return a number in Python, of any type."""
    text = draw.choice(NUMBERS)
    return f"{draw.choice(TYPES)}({text})" if draw.random() < 0.6 else f"({text})"


def expression(draw: random.Random, depth: int) -> str:
    """Return a result in Python: numbers, texts, and what they may be nested in."""
    kind = draw.random()
    if depth == 0 or kind < 0.4:
        return number(draw) if draw.random() < 0.85 else draw.choice(OTHERS)
    items = [expression(draw, depth - 1) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    if kind < 0.65:
        return f"[{', '.join(items)}]"
    if kind < 0.75:
        return f"tuple([{', '.join(items)}])"
    if kind < 0.83:
        return f"{{{', '.join(f'{number(draw)}: {item}' for item in items)}}}"
    if kind < 0.88:
        return f"set([{', '.join(number(draw) for _ in items)}])"
    shape = draw.choice(("{}", "[{}]", "[[{}]]"))
    return f"np.array({shape.format(number(draw))})"


def altered(draw: random.Random, text: str) -> str:
    """Return a result that may be equal: the same one, or with numbers of other types."""
    for name in TYPES:
        while f"{name}(" in text and draw.random() < 0.5:
            text = text.replace(f"{name}(", f"{draw.choice((*TYPES, ''))}(", 1)
    if draw.random() < 0.3:
        text = text.replace("(0.1)", draw.choice(("(0.1+1e-9)", "np.float32(0.1)")))
    return text


def value(text: str) -> Any:
    names = {"np": np, "Fraction": Fraction, "Decimal": Decimal}
    with np.errstate(all="ignore"):
        return eval(text, names)


def official(outs: Sequence[Any], expected: Sequence[Any], atol: float) -> list[bool]:
    """Return what EvalPlus 0.3.1 makes of results (eval/__init__.py, unsafe_execute)."""
    found = []
    for out, exp in zip(outs, expected, strict=True):
        try:
            exact_match = out == exp
            if atol == 0 and is_floats(exp):
                atol = 1e-6
            if not exact_match and atol != 0:
                assert type(out) is type(exp)
                if isinstance(exp, list | tuple):
                    assert len(out) == len(exp)
                assert np.allclose(out, exp, rtol=1e-07, atol=atol)
            else:
                assert exact_match
        except Exception:
            found.append(False)
        else:
            found.append(True)
    return found


def is_floats(x: Any) -> bool:
    if isinstance(x, float):
        return True
    if isinstance(x, list | tuple) and x:
        return all(isinstance(i, float) for i in x)
    if isinstance(x, np.ndarray):
        return x.dtype in (np.float64, np.float32)
    return False


def cases(num: int, seed: int) -> list[tuple[str, str]]:
    """Return pairs of a result and the expected one that both can be made."""
    draw = random.Random(seed)
    found: list[tuple[str, str]] = []
    while len(found) < num:
        expected = expression(draw, draw.choice((0, 0, 1, 2)))
        out = altered(draw, expected) if draw.random() < 0.8 else expression(draw, 1)
        try:
            value(expected), value(out)
        except Exception:
            continue
        found.append((out, expected))
    return found


@cache
def prelude() -> dict[str, Any]:
    """Return the names of the prelude, without the call that closes standard input."""
    module: dict[str, Any] = {}
    exec(PRELUDE.replace("\n_treegen_no_input()\n", "\n"), module)
    return module


def ours(outs: Sequence[Any], expected: Sequence[Any], atol: float) -> list[bool]:
    """Return the judge's verdict on each result, as they come out of the sandbox."""

    def call_value(result: Any) -> CallValue:
        returned = prelude()["_treegen_result"](result, False)
        return CallValue(*value_json.loads(value_json.dumps(returned), allow_numpy=True))

    wants = build_expected("humaneval", "f", atol, [call_value(each) for each in expected])
    return [
        is_expected("humaneval", "f", [], call_value(out), want)
        for out, want in zip(outs, wants, strict=True)
    ]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("atol", [0, 1e-6])
def test_drawn_results_are_judged_as_by_evalplus(atol: float) -> None:
    different, right = [], 0
    for out, expected in cases(2000, seed=9):
        official_result = official([value(out)], [value(expected)], atol)
        right += official_result[0]
        if ours([value(out)], [value(expected)], atol) != official_result:
            different.append((out, expected, official_result))
    assert different == []
    assert 800 < right < 1800


def test_the_official_rule_is_restated_as_it_is() -> None:
    check = pytest.importorskip("evalplus.eval").untrusted_check
    pairs = cases(300, seed=2)
    outs, expected = ([value(pair[at]) for pair in pairs] for at in (0, 1))
    texts = ", ".join(f"lambda: {out}" for out, _ in pairs)
    program = (
        "import warnings\nimport numpy as np\nfrom fractions import Fraction\n"
        "from decimal import Decimal\nwarnings.simplefilter('ignore')\n"
        f"outs = [{texts}]\nf = lambda x: outs[x]()\n"
    )
    _, details = check(
        "humaneval", program, [[i] for i in range(300)], "f", expected, 0, [1.0] * 300
    )
    assert [bool(each) for each in details] == official(outs, expected, 0)


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nlines = sys.stdin.read()\n",
        "import sys\nfor line in sys.stdin:\n    pass\n",
        "import sys\nsys.stdin.readline()\n",
        "x = input()\n",
        "import sys\nsys.stdin.buffer\n",
    ],
)
def test_programs_that_read_standard_input_fail_as_in_the_published_scorers(program: str) -> None:
    tasks: list[Any] = [HumanEvalPlus(), HumanEval()]
    row = {
        "task_id": "T/1",
        "prompt": "def f(x):\n",
        "entry_point": "f",
        "base_input": [[1]],
        "canonical_solution": "    return x\n",
        "plus_input": [],
        "atol": 0,
        "test": "def check(f):\n    assert f(1) == 1\n",
    }
    with SandboxPool(limits=HumanEvalPlus.default_limits, packages=("numpy",)) as judge:
        for task in tasks:
            made = task.make_cases(task.record(row)[2], judge)
            for before, verdict in (("", "accepted"), (program, "runtime_error")):
                source = f"{before}def f(x):\n    return x\n"
                result = judge.run(made.program(source), made.tests, made.compare)
                assert result.verdict is ProgramStatus(verdict), (before, result)
