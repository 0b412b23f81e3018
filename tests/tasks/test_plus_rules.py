"""Results of unusual kinds, judged as EvalPlus 0.3.1 does; it is asked itself where it is there."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from treegen.tasks.code.plus import HumanEvalPlus, MBPPPlus, PlusBase, PlusTask
from treegen.tasks.sandbox import SandboxPool


class Case(NamedTuple):
    """A program, what it is judged by, and whether EvalPlus accepts it.

    reference: the right function's body, of x. ours: False where the judge differs, on purpose.
    """

    name: str
    reference: str
    program: str
    calls: list[list[Any]]
    accepted: bool
    function: str = "f"
    kind: str = "humaneval"
    atol: float = 0
    ours: bool | None = None


_REUSED = "out = []\ndef f(x):\n    out.clear()\n    out.extend({})\n    return out\n"
_CALLS: list[list[Any]] = [[[1, 2]], [[3]], [[]]]
CASES = (
    # Each result is compared before the next call.
    Case("one list, again and again", "list(x)", _REUSED.format("x"), _CALLS, True),
    Case("a wrong list", "list(x)", _REUSED.format("x[:1]"), _CALLS, False),
    Case(
        "a list that later calls mend",
        "[sum(x)]",
        "kept = []\ndef f(x):\n    for old, at in kept:\n        old[:] = [at]\n"
        "    kept.append((x, sum(x)))\n    return x\n",
        [*_CALLS, [[7]]],
        False,
    ),
    Case(
        "the caller's list, mended",
        "sorted(x)",
        "kept = []\ndef f(x):\n    for old in kept:\n        old.sort()\n    kept.append(x)\n"
        "    return x\n",
        [[[2, 1]], [[1]]],
        False,
    ),
    # Kinds of numbers.
    Case(
        "a fraction",
        "x / 2",
        "from fractions import Fraction\nf = lambda x: Fraction(x, 2)",
        [[1], [3]],
        True,
    ),
    Case(
        "a fraction that is off",
        "x / 3",
        "from fractions import Fraction\nf = lambda x: Fraction(x, 3)",
        [[1]],
        False,
    ),
    Case(
        "a decimal",
        "x / 4",
        "from decimal import Decimal\nf = lambda x: Decimal(x) / 4",
        [[1], [3]],
        True,
    ),
    Case(
        "decimals in a list",
        "[x / 4]",
        "from decimal import Decimal\nf = lambda x: [Decimal(x) / 4]",
        [[1]],
        True,
    ),
    Case(
        "a decimal of a decimal",
        "__import__('decimal').Decimal(x) / 4",
        "f = lambda x: x / 4",
        [[1]],
        True,
    ),
    Case(
        "a numpy float", "x / 4", "import numpy as np\nf = lambda x: np.float64(x) / 4", [[1]], True
    ),
    Case(
        "a numpy float that is near",
        "x / 4",
        "import numpy as np\nf = lambda x: np.float64(x) / 4 + 1e-9",
        [[1]],
        False,
    ),
    Case("a float that is near", "x / 4", "f = lambda x: x / 4 + 1e-9", [[1]], True),
    Case(
        "numpy floats in a list",
        "[x / 4]",
        "import numpy as np\nf = lambda x: [np.float64(x) / 4 + 1e-9]",
        [[1]],
        True,
    ),
    Case("an array of one", "[x]", "import numpy as np\nf = lambda x: np.array([x])", [[1]], True),
    Case(
        "an array of one for a number",
        "x",
        "import numpy as np\nf = lambda x: np.array([[x]])",
        [[1]],
        True,
    ),
    Case(
        "arrays of one in a list",
        "[[x]]",
        "import numpy as np\nf = lambda x: [np.array([x])]",
        [[1]],
        True,
    ),
    Case(
        "a single float of numpy",
        "x / 10",
        "import numpy as np\nf = lambda x: np.float32(x / 10)",
        [[1], [3]],
        True,
    ),
    Case(
        "a half float in a dict",
        "{'a': x / 10}",
        "import numpy as np\nf = lambda x: {'a': np.float16(x / 10)}",
        [[1], [3]],
        True,
    ),
    Case(
        "a single float for a list of one",
        "[x / 10]",
        "import numpy as np\nf = lambda x: np.float32(x / 10)",
        [[1]],
        False,
    ),
    Case(
        "single floats as keys",
        "{x / 10: 1}",
        "import numpy as np\nf = lambda x: {np.float32(x / 10): 1}",
        [[1]],
        False,
    ),
    Case(
        "a number of its own that stands for one of numpy",
        "x",
        "class N:\n    def __init__(self, x):\n        self.treegen_numpy = ('int64', None, x)\n"
        "    __eq__ = lambda a, b: True\nf = lambda x: N(x)",
        [[1]],
        True,
        ours=False,
    ),
    Case(
        "an array of two",
        "[x, x]",
        "import numpy as np\nf = lambda x: np.array([x, x])",
        [[1]],
        False,
    ),
    Case(
        "a numpy int for a list of one",
        "[x]",
        "import numpy as np\nf = lambda x: np.int64(x)",
        [[1]],
        True,
    ),
    Case(
        "a numpy int for a list of two",
        "[x, x]",
        "import numpy as np\nf = lambda x: np.int64(x)",
        [[1]],
        False,
    ),
    Case(
        "an array without a dimension for a list of one",
        "[x]",
        "import numpy as np\nf = lambda x: np.array(x)",
        [[1]],
        True,
    ),
    Case(
        "an array without a dimension as a set",
        "x",
        "import numpy as np\nDiff = np.array",
        [["a"]],
        False,
        "Diff",
        "mbpp",
    ),
    Case(
        "a signaling nan",
        "x",
        "from decimal import Decimal\nf = lambda x: Decimal('sNaN')",
        [[1]],
        False,
    ),
    Case(
        "each its own nan", "[float('nan') * x]", "f = lambda x: [float('nan') * x]", [[1.0]], False
    ),
    Case("a numpy int", "x", "import numpy as np\nf = lambda x: np.int64(x)", [[1]], True),
    # The tolerance.
    Case(
        "a tolerance that stays",
        "x",
        "f = lambda x: x + 1 if isinstance(x, int) else x",
        [[0.5], [10**9]],
        True,
    ),
    Case(
        "no tolerance before floats",
        "x",
        "f = lambda x: x + 1 if isinstance(x, int) else x",
        [[10**9], [0.5]],
        False,
    ),
    Case(
        "mixed after floats",
        "x",
        "f = lambda x: [each + 1e-9 for each in x]",
        [[[0.5]], [[0.5, 1.0]]],
        True,
    ),
    Case("mixed before floats", "[1, x]", "f = lambda x: [1, x + 1e-9]", [[0.5]], False),
    Case("rows that numpy repeats", "[[x, x]]", "f = lambda x: [[x]]", [[0.5]], True, atol=1e-6),
    Case(
        "a dict of near floats", "{1: x}", "f = lambda x: {1: x + 1e-9}", [[0.5]], False, atol=1e-6
    ),
    Case(
        "texts with a tolerance", "str(x)", "f = lambda x: str(x) + ' '", [[0.5]], False, atol=1e-6
    ),
    Case("another type with a tolerance", "[x]", "f = lambda x: (x + 1e-9,)", [[0.5]], False),
    # Views and generators.
    Case("keys for a set", "set(x)", "f = lambda x: dict.fromkeys(x).keys()", _CALLS, True),
    Case("keys for a list", "list(x)", "f = lambda x: dict.fromkeys(x).keys()", _CALLS, False),
    Case("a generator for a list", "list(x)", "f = lambda x: (each for each in x)", _CALLS, False),
    Case(
        "a generator as a set",
        "list(x)",
        "Diff = lambda x: (each for each in x)",
        _CALLS,
        True,
        "Diff",
        "mbpp",
    ),
    Case(
        "keys as a set",
        "list(x)",
        "Diff = lambda x: dict.fromkeys(x).keys()",
        _CALLS,
        True,
        "Diff",
        "mbpp",
    ),
    Case(
        "a map that fails",
        "list(x)",
        "Diff = lambda x: map(lambda y: 1 // (y - 1), x)",
        [[[2]], [[2, 1]]],
        False,
        "Diff",
        "mbpp",
    ),
    Case(
        "near floats as a set",
        "list(x)",
        "Diff = lambda x: [y + 1e-9 for y in x]",
        [[[0.5]]],
        True,
        "Diff",
        "mbpp",
    ),
    Case(
        "near floats of a generator",
        "list(x)",
        "Diff = lambda x: (y + 1e-9 for y in x)",
        [[[0.5]]],
        False,
        "Diff",
        "mbpp",
    ),
    Case("a number as a set", "list(x)", "Diff = lambda x: 5", _CALLS, False, "Diff", "mbpp"),
    # Rules of single tasks.
    Case(
        "anything",
        "True",
        "are_equivalent = lambda x: object()",
        [[1]],
        True,
        "are_equivalent",
        "mbpp",
    ),
    Case(
        "anything but arrays",
        "True",
        "import numpy as np\nare_equivalent = lambda x: np.ones(2)",
        [[1]],
        False,
        "are_equivalent",
        "mbpp",
    ),
    Case(
        "an array of nothing is something",
        "__import__('re').match('a', x)",
        "import numpy as np\ncheck_str = lambda x: np.array(None)",
        [["a"]],
        True,
        "check_str",
        "mbpp",
    ),
    Case(
        "a match",
        "__import__('re').match('a', x)",
        "import re\ncheck_str = lambda x: re.match('a', x)",
        [["a"], ["b"]],
        True,
        "check_str",
        "mbpp",
    ),
    Case(
        "a numpy truth value is something",
        "__import__('re').match('a', x)",
        "import numpy as np\ncheck_str = lambda x: np.bool_(x == 'a')",
        [["a"], ["b"]],
        False,
        "check_str",
        "mbpp",
    ),
    # Where the judge differs.
    Case(
        "a class that equals all",
        "x",
        "class C:\n    __eq__ = lambda a, b: True\nf = lambda x: C()",
        [[1]],
        True,
        ours=False,
    ),
    Case("bytes", "b'a'", "f = lambda x: b'a'", [[1]], True, ours=False),
    Case(
        "sets in a set", "{frozenset(x)}", "f = lambda x: {frozenset(x)}", [[[1]]], True, ours=False
    ),
    # Its rule for find_zero forgets to count the call, so it accepts no program.
    Case(
        "a root",
        "-0.5",
        "find_zero = lambda x: -0.5 + 1e-9",
        [[[1, 2]]],
        False,
        "find_zero",
        atol=1e-4,
        ours=True,
    ),
    Case(
        "coefficients that are taken away",
        "-0.5",
        "def find_zero(x):\n    x.clear()\n    return 7",
        [[[1, 2]]],
        False,
        "find_zero",
        atol=1e-4,
    ),
)


@pytest.fixture(scope="module")
def judge() -> Iterator[SandboxPool]:
    with SandboxPool(limits=HumanEvalPlus.default_limits, packages=("numpy",)) as found:
        yield found


def _record(case: Case) -> PlusTask:
    solution = f"def {case.function}(x):\n    return {case.reference}\n"
    return PlusTask("", case.function, solution, case.calls, [], case.atol)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_unusual_results_are_judged_as_by_evalplus(judge: SandboxPool, case: Case) -> None:
    task: PlusBase = HumanEvalPlus() if case.kind == "humaneval" else MBPPPlus()
    cases = task.make_cases(_record(case), judge)
    result = judge.run(cases.program(case.program), cases.tests, cases.compare)
    assert result.accepted is (case.accepted if case.ours is None else case.ours), result


def test_evalplus_itself_says_the_same() -> None:
    official = pytest.importorskip("evalplus.eval").untrusted_check
    trusted = pytest.importorskip("evalplus.gen.util").trusted_exec
    for case in CASES:
        record, name = _record(case), case.function
        whether = name == "check_str"
        expected = trusted(record.solution, case.calls, name, output_not_none=whether)
        seconds = [1.0] * len(case.calls)
        status, _ = official(
            case.kind, case.program, case.calls, name, expected, case.atol, seconds
        )
        assert (status == "pass") is case.accepted, case
