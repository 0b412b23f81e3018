"""Tasks of programs: published files and prompts, the reading of answers, tests, verdicts."""

import base64
import json
import pickle
import random
import re
import zlib
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command, samples_of, write_data

from treegen.errors import DataError, InputError
from treegen.evals.chat import as_chat
from treegen.prompts.tree import prompts_of
from treegen.tasks import TaskOptions, get_task
from treegen.tasks.code.calls import OTHER, CallValue, build_expected, is_expected
from treegen.tasks.code.humaneval import HumanEval
from treegen.tasks.code.livecodebench import (
    LiveCodeBench,
    read_tests,
    same_lines,
    same_value,
    unpack_text,
)
from treegen.tasks.code.mbpp import MBPP
from treegen.tasks.code.plus import HumanEvalPlus, MBPPPlus, mbpp_arguments
from treegen.tasks.code.task import CodeTask
from treegen.tasks.programs.task import ProgramOutcome, block_that_defines
from treegen.tasks.sandbox import (
    ProgramResult,
    ProgramStatus,
    SandboxError,
    SandboxPool,
    value_json,
)

NAMES = ("humaneval", "humaneval-plus", "livecodebench", "mbpp", "mbpp-plus")


def prompts(task: CodeTask, options: TaskOptions) -> list[str]:
    tree = task.tree(task.load(options), 1)
    return ["".join(str(node.content) for node in prompt.path) for prompt in prompts_of(tree)]


def run(task: CodeTask, samples: list[tuple[str, str]]) -> list[ProgramResult]:
    with SandboxPool(limits=task.limits, packages=("numpy",)) as judge:
        flights = []
        for problem_id, text in samples:
            source, cases = task.program(problem_id, text), task.cases(problem_id, judge)
            assert source is not None
            flights.append(judge.submit(cases.program(source), cases.tests, cases.compare))
        return [flight.result() for flight in flights]


# Data and prompts


@pytest.mark.parametrize("name", NAMES)
def test_bundled_problems_load_without_gaps(name: str) -> None:
    task = get_task(name)
    data = task.load(TaskOptions())
    assert data.problems and not data.skipped
    assert data.label == ("" if name == "humaneval" else "bundled problems")
    assert len({problem.id for problem in data.problems}) == len(data.problems)
    with pytest.raises(InputError, match="must run programs to score them"):
        task.score(data.problems[0], "")


def test_humaneval_is_asked_as_published() -> None:
    task = HumanEval()
    texts = prompts(task, TaskOptions())
    assert len(texts) == 164 and texts[0].startswith("from typing import List\n\n\ndef has_close")
    assert task.defaults.sampling.stops == ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
    with pytest.raises(InputError, match="does not support few-shot examples"):
        task.load(TaskOptions(num_fewshot=2))


def test_mbpp_is_asked_as_published_with_tasks_2_to_4(tmp_path: Path) -> None:
    """The words are those of the paper, and of lm-eval's mbpp."""
    rows: list[Any] = [
        {
            "task_id": n,
            "text": f"Do {n}.",
            "code": f"def f():\r\n  return {n}",
            "test_list": [f"assert f() == {n}", "assert f", "assert 1"],
            "test_setup_code": "",
        }
        for n in (1, 2, 3, 4, 11, 511)
    ]

    def question(n: int) -> str:
        return (
            f"You are an expert Python programmer, and here is your task: Do {n}. Your code should "
            f"pass these tests:\n\nassert f() == {n}\nassert f\nassert 1\n[BEGIN]\n"
        )

    shots = "".join(f"{question(n)}def f():\r\n  return {n}\n[DONE]\n\n" for n in (2, 3, 4))
    path = write_data(tmp_path / "mbpp.jsonl", rows)
    assert prompts(MBPP(), TaskOptions(data=path)) == [f"{shots}{question(11)}"]
    assert prompts(MBPP(), TaskOptions(data=str(tmp_path), num_fewshot=0)) == [question(11)]
    (other,) = MBPP().load(TaskOptions(data=path, split="validation")).problems
    assert other.id == "MBPP/511"
    sanitized = {
        "task_id": 12,
        "prompt": "Do.",
        "code": "x = 1",
        "test_imports": ["import math"],
        "test_list": ["assert x == 1"],
    }
    (tmp_path / "sanitized-mbpp.json").write_text(json.dumps([sanitized]))
    task = MBPP()
    task.load(TaskOptions(data=str(tmp_path), num_fewshot=0, extra={"set": "sanitized"}))
    assert task.records["MBPP/12"].setup == "import math"
    with pytest.raises(InputError, match="has 0 tasks for few-shot examples"):
        task.load(TaskOptions(data=str(tmp_path), extra={"set": "sanitized"}))
    write_data(tmp_path / "mbpp.jsonl", [{**rows[0], "task_id": n} for n in range(1, 12)])
    data = MBPP().load(TaskOptions(data=path, num_fewshot=10))
    assert len(data.turns) == 10  # all tasks of the prompt split, 10 among them
    bad = write_data(tmp_path / "bad.jsonl", [rows[0], {"task_id": 2}])
    with pytest.raises(DataError, match=r"bad\.jsonl, line 2: the row has no tests"):
        MBPP().load(TaskOptions(data=path, fewshot_file=bad))
    with pytest.raises(InputError, match="has no split 'dev'; use one of test, prompt"):
        task.load(TaskOptions(data=path, split="dev"))


def test_livecodebench_is_asked_as_published() -> None:
    task = LiveCodeBench()
    data = task.load(TaskOptions())
    (prompt,) = [p for p in prompts_of(task.tree(data, 1)) if p.id == "own_d"]
    text = "".join(str(node.content) for node in prompt.path)
    assert "tests.\n\n### Question:\nReturn the number" in text
    chat = as_chat(task.tree(data, 1), None, multiturn=False)
    messages: Any = next(leaf.content for leaf in chat.children if leaf.id == "own_d")
    assert [message["role"] for message in messages] == ["system", "user"]
    assert messages[0]["content"].endswith("passes all tests.")
    starter = data_row("own_d")["starter_code"]
    assert messages[1]["content"] == (
        f"### Question:\n{data_row('own_d')['question_content']}\n\n### Format: You will use the "
        "following starter code to write the solution to the problem and enclose your code within "
        f"delimiters.\n```python\n{starter}\n```\n\n### Answer: (use the provided format with "
        "backticks)\n\n"
    )


def data_row(id: str) -> dict[str, Any]:
    rows, _ = LiveCodeBench.source.read(None, None)
    return next(row for _, row in rows if row["question_id"] == id)


def test_livecodebench_by_days_and_difficulty() -> None:
    def ids(**extra: str) -> list[str]:
        found = LiveCodeBench().load(TaskOptions(extra=extra)).problems
        return [problem.id for problem in found]

    assert ids() == ["own_a", "own_b", "own_c", "own_d", "own_e", "own_f"]
    assert ids(**{"from": "2024-09-07", "to": "2025-01-18"}) == ["own_c", "own_d", "own_e"]
    assert ids(difficulty="hard") == ["own_e", "own_f"]
    with pytest.raises(InputError, match="is after to"):
        ids(**{"from": "2025-01-01", "to": "2024-01-01"})
    with pytest.raises(InputError, match="a date such as"):
        ids(**{"from": "2025-13-01"})
    with pytest.raises(DataError, match="no usable problem"):
        ids(**{"from": "2030-01-01"})


def test_livecodebench_names_the_file_of_a_bad_line(tmp_path: Path) -> None:
    row = data_row("own_a")
    write_data(tmp_path / "test.jsonl", [row, {**row, "question_id": ""}])
    write_data(tmp_path / "test2.jsonl", [{**row, "question_id": "b", "contest_date": "soon"}])
    options = TaskOptions(data=str(tmp_path))
    assert [str(skipped) for skipped in LiveCodeBench().load(options).skipped] == [
        f"{tmp_path}/test.jsonl, line 2: question_id is empty",
        f"{tmp_path}/test2.jsonl, line 1: contest_date must be a date, such as 2024-08-01",
    ]
    write_data(tmp_path / "test3.jsonl", [{**row, "question_id": "c"}, row])
    places = f"{tmp_path}/test.jsonl, line 1, and {tmp_path}/test3.jsonl, line 2, have the same id"
    with pytest.raises(DataError, match=re.escape(places)):
        LiveCodeBench().load(options)


def test_livecodebench_releases_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1, 9):
        row = {**data_row("own_a"), "question_id": f"p{number}"}
        write_data(tmp_path / f"test{number if number > 1 else ''}.jsonl", [row])

    def ids(release: str | None) -> str:
        extra = {} if release is None else {"release": release}
        options = TaskOptions(data=str(tmp_path), extra=extra)
        return "".join(problem.id[1:] for problem in LiveCodeBench().load(options).problems)

    assert ids(None) == ids("release_v6") == "123456"
    assert ids("release_v5") == "12345" and ids("release_v8") == "12345678"
    assert ids("v6") == "6" and ids("v4_v6") == "456"
    for wrong in ("v0", "v6_v4", "release_v4_v6", "6", "v7x", "latest"):
        with pytest.raises(InputError, match="release must be like release_v6"):
            ids(wrong)
    with pytest.raises(DataError, match=r"test9\.jsonl was not found"):
        ids("v9")
    (tmp_path / "test5.jsonl").unlink()
    assert ids(None) == "12346"
    with pytest.raises(DataError, match=r"test5\.jsonl was not found"):
        ids("release_v6")
    files = []

    def table(*given: Any, data_files: Any, **more: Any) -> list[dict[str, Any]]:
        files.extend(data_files["test"])
        return [data_row("own_a")]

    monkeypatch.setattr("treegen.tasks.code.livecodebench.load_table", table)
    LiveCodeBench().load(TaskOptions(data="hf", extra={"release": "v5_v6"}))
    assert [each.rpartition("/")[2] for each in files] == ["test5.jsonl", "test6.jsonl"]
    with pytest.raises(InputError, match=r"release_v7 is not available .* ends at v6"):
        LiveCodeBench().load(TaskOptions(data="hf", extra={"release": "release_v7"}))


# Private tests


def pack(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value, protocol))).decode()


@pytest.mark.parametrize("protocol", range(6))
def test_packed_tests_are_read_without_unpickling(protocol: int) -> None:
    for text in ("[]", '[{"input": "\u00e9\\n", "output": ""}]', "x" * 100_000):
        assert unpack_text(pack(text, protocol)) == text


class Evil:
    def __reduce__(self) -> Any:
        return (exec, ("raise SystemExit('ran')",))


@pytest.mark.parametrize("value", [Evil(), ["a"], ("a", "b"), b"a", 1, {"a": "b"}])
def test_other_pickles_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="private tests"):
        unpack_text(pack(value))


def test_broken_packed_tests_are_refused() -> None:
    good = zlib.compress(pickle.dumps("text"))
    rng = random.Random(0)
    with pytest.raises(ValueError, match="neither JSON nor compressed"):
        unpack_text("not base64!")
    for _ in range(300):
        data = bytearray(good if rng.random() < 0.5 else pickle.dumps("text"))
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        packed = bytes(data) if rng.random() < 0.5 else zlib.compress(bytes(data))
        try:
            assert isinstance(unpack_text(base64.b64encode(packed).decode()), str)
        except ValueError as error:
            assert "private tests" in str(error)
    with pytest.raises(ValueError, match="has no tests"):
        read_tests("[]", pack("[]"), None)
    with pytest.raises(ValueError, match="surrogates"):
        read_tests([{"input": "\ud800", "output": ""}], "[]", None)


# When results are right


def by_the_book(output: str, expected: str) -> bool:
    """The published rule for printed output, step by step."""
    actual, wants = (
        [line.strip() for line in text.strip().split("\n")] for text in (output, expected)
    )
    if len(actual) != len(wants):
        return False
    for one, other in zip(actual, wants, strict=True):
        if one == other:
            continue
        try:
            if [Decimal(x) for x in one.split()] != [Decimal(x) for x in other.split()]:
                return False
        except ArithmeticError:
            return False
    return True


def test_livecodebench_compares_lines_as_published() -> None:
    rng = random.Random(0)
    parts = [
        "1",
        "1.0",
        "01",
        "-0",
        "0",
        "1e0",
        "a",
        " ",
        "  ",
        "\n",
        "\n\n",
        "\t",
        "nan",
        "inf",
        "50000000000000001",
        "50000000000000000",
        "sNaN",
        "YES",
        "1_0",
    ]
    right = 0
    for _ in range(5000):
        wanted = [rng.choice(parts) for _ in range(rng.randint(0, 6))]
        given = [rng.choice(parts) if rng.random() < 0.2 else part for part in wanted]
        output, expected = "".join(given), "".join(wanted)
        if "sNaN" in output + expected:
            assert same_lines(output, expected) in (True, False)
            continue
        assert same_lines(output, expected) == by_the_book(output, expected), (output, expected)
        right += same_lines(output, expected)
    assert 500 < right < 4500
    assert same_lines("1e999999999", "2") is False and same_lines("9" * 10**6, "1") is False
    assert same_value((1, 2), [1, 2]) and same_value(True, 1) and not same_value([(1,)], [[1]])


def test_evalplus_rules_for_single_tasks() -> None:
    def right(
        name: str, out: Any, expected: Any, inputs: list[Any], kind: str = "mbpp", atol: float = 0
    ) -> bool:
        (goal,) = build_expected(kind, name, atol, [_result(expected)])
        return is_expected(kind, name, inputs, _result(out), goal)

    assert right("sum_div", 0, 6, [7]) and not right("sum_div", 1, 6, [7])
    assert right("are_equivalent", "anything", True, [1, 2])
    assert right("similar_elements", [2, 1, 2], (1, 2), [])
    assert not right("similar_elements", 5, (1, 2), [])
    assert not right("similar_elements", [i * (2**61 - 1) for i in range(10**5)], (1, 2), [])
    assert right("surface_Area", 35, 9, [3, 4]) and not right("surface_Area", 34, 9, [3, 4])
    assert right("digit_distance_nums", 6, 0, [23, 56])
    assert right("check_str", True, True, ["a"]) and not right("check_str", None, True, ["a"])
    assert right("check_str", OTHER, True, ["a"]) and not right("check_str", OTHER, None, ["a"])
    assert right("find_zero", -0.5, -0.5, [[1, 2]], "humaneval", 1e-4)
    assert not right("find_zero", "x", -0.5, [[1, 2]], "humaneval")
    assert right("f", 0.1 + 0.2, 0.3, []) and not right("f", 1, 0.9999, [])
    assert right("f", [0.1 + 0.2], [0.3], []) and not right("f", (0.1 + 0.2,), [0.3], [])
    assert not right("f", OTHER, None, [])


def _result(value: Any) -> CallValue:
    if value is OTHER:
        return CallValue(OTHER, None, "re.Match")
    return CallValue("value", value, f"builtins.{type(value).__name__}")


def test_evalplus_keeps_a_tolerance_from_the_first_floats_on() -> None:
    found = build_expected(
        "humaneval", "f", 0, [_result(value) for value in (3, [0.5], [1, 0.5], 3)]
    )
    assert [each.atol for each in found] == [0, 1e-6, 1e-6, 1e-6]
    assert [each.rule_atol for each in found] == [0, 0, 1e-6, 1e-6]
    assert is_expected("humaneval", "f", [], _result([1, 0.5 + 1e-9]), found[2])
    assert not is_expected("humaneval", "f", [], _result(4), found[0])
    assert [each.atol for each in build_expected("mbpp", "f", 0.1, [_result(0.5)] * 2)] == [
        0.1,
        0.1,
    ]


def test_mbpp_inputs_become_what_json_does_not_have() -> None:
    assert mbpp_arguments("Mbpp/2", [[1], [2]]) == [(1,), (2,)]
    assert mbpp_arguments("Mbpp/63", [[[1], [2]]]) == [[(1,), (2,)]]
    assert mbpp_arguments("Mbpp/75", [[[1]], 2]) == [[(1,)], 2]
    assert mbpp_arguments("Mbpp/106", [[1], [2]]) == [[1], (2,)]
    assert mbpp_arguments("Mbpp/115", [[[1], [], {}]]) == [[{1}, {}, {}]]
    assert mbpp_arguments("Mbpp/124", ["1", "2j"]) == [1.0, 2j]
    assert mbpp_arguments("Mbpp/252", ["1+1j"]) == [1 + 1j]
    assert mbpp_arguments("Mbpp/259", [[[1]], [[2]]]) == [((1,),), ((2,),)]
    assert mbpp_arguments("Mbpp/278", [[1, [2]]]) == [(1, (2,))]
    assert mbpp_arguments("Mbpp/580", [[1, [2]]]) == [(1, (2,))]
    assert mbpp_arguments("Mbpp/722", [{"a": [1]}, 2]) == [{"a": (1,)}, 2]
    assert mbpp_arguments("Mbpp/3", [[1]]) == [[1]]
    with pytest.raises(ValueError, match="does not have the format of task Mbpp/2"):
        mbpp_arguments("Mbpp/2", [1])
    assert value_json.loads(value_json.dumps([1 + 2j, {(1j,): 2}])) == [1 + 2j, {(1j,): 2}]


# Reading programs


def test_a_chat_answer_is_its_last_block_that_defines_the_function() -> None:
    one, other = "def f():\n    return 1\n", "x = f()\n"
    text = f"First:\n```python\n{one}```\nUse it:\n```\n{other}```\nDone."
    assert block_that_defines(text, ["f"]) == one
    assert block_that_defines(text, ["g"]) == other
    assert block_that_defines(f"```py\n{one}", ["f"]) == one
    assert block_that_defines(one, ["f"]) == one and block_that_defines("no", ["f"]) is None
    assert block_that_defines("```\n\n```", []) is None
    assert (
        block_that_defines("```\nf = lambda: 1\n```\n```\nfoo()\n```", ["f"]) == "f = lambda: 1\n"
    )
    task = HumanEval()
    data = task.load(TaskOptions(ids=["HumanEval/32"], extra={"form": "chat"}))
    assert data.label == "chat form" and "markdown code block:" in data.problems[0].question
    found = task.program("HumanEval/32", "```\ndef find_zero(xs):\n    return 0\n```")
    assert found is not None and "def poly(" in found and found.count("def find_zero") == 1
    assert task.defaults.sampling.stops == ()


@pytest.mark.parametrize("piece", ["`", "~", " ", "```", "```\n", "\n", "def f", "a", "``` "])
def test_hostile_answers_are_read_in_linear_time(piece: str) -> None:
    """Reading one of these in quadratic time would take minutes."""
    text = f"```{piece * (10**6 // len(piece))}"
    found = block_that_defines(text, ["f"])
    assert found is None or found in text
    assert LiveCodeBench().program("x", text) in (None, "\n".join(text.split("\n")[-2:-1]))


def test_livecodebench_reads_what_stands_between_the_last_two_fences() -> None:
    program = LiveCodeBench().program
    assert program("x", "```python\na\n```\nor\n```python\nb\n```\n") == "b"
    assert program("x", "```a\n```") is None and program("x", "print(1)") is None
    assert program("x", "  ```\nprint(1)\n ```") == "print(1)"


# Judging


def test_programs_are_judged_by_each_task() -> None:
    task: CodeTask = LiveCodeBench()
    task.load(TaskOptions())
    good = "```\nclass Solution:\n  def mostFrequent(self, n):\n    c = Counter(n)\n    "
    good += "return min(c, key=lambda x: (-c[x], x))\n```"
    bad = "```\ndef mostFrequent(n):\n  return n[0]\n```"
    sums = "```\na, b = map(int, input().split())\nprint(a + b)\n```"
    found = run(task, [("own_d", good), ("own_d", bad), ("own_a", sums), ("own_b", sums)])
    assert [result.accepted for result in found] == [True, False, True, False]
    assert found[3].verdict is ProgramStatus.RUNTIME_ERROR
    plus: CodeTask = HumanEvalPlus()
    plus.load(TaskOptions(ids=["Own/1"]))
    (result,) = run(plus, [("Own/1", "    return sum(numbers) / len(numbers)\n")])
    assert [test.verdict for test in result.tests] == [
        ProgramStatus.ACCEPTED,
        ProgramStatus.WRONG_ANSWER,
    ]


def test_evalplus_has_a_verdict_for_each_part() -> None:
    task = HumanEvalPlus()
    task.load(TaskOptions())
    outcome = ProgramOutcome("x", "wrong_answer", "AW")
    verdicts = task.score_outcome("Own/0", outcome)
    assert (verdicts["base"].correct, verdicts["plus"].correct) == (True, False)
    assert verdicts["plus"].credit is None and verdicts["plus"].outcome == "wrong_answer"
    timed_out = task.score_outcome("Own/0", ProgramOutcome("x", "timeout", "T-"))
    assert timed_out["base"].outcome == "timeout"
    assert not task.score_outcome("Own/0", ProgramOutcome(None, "no_program", ""))["base"].correct


def test_a_wrong_reference_is_reported_and_not_scored(tmp_path: Path) -> None:
    row = {
        "task_id": "Mbpp/1",
        "prompt": '""" f """\n',
        "entry_point": "f",
        "atol": 0,
        "canonical_solution": "def f(x):\n    return 1 / x\n",
        "base_input": [[1]],
        "plus_input": [[0]],
    }
    task = MBPPPlus()
    task.load(TaskOptions(data=write_data(tmp_path / "a.jsonl", [row])))
    with (
        SandboxPool(limits=task.limits) as judge,
        pytest.raises(SandboxError, match="reference solution of f fails"),
    ):
        task.cases("Mbpp/1", judge)


def test_samples_without_a_reference_are_counted_as_not_judged(
    tmp_path: Path, treegen: Command
) -> None:
    row = {
        "task_id": "Mbpp/1",
        "prompt": '""" f """\n',
        "entry_point": "f",
        "atol": 0,
        "canonical_solution": "def f(x):\n    return 1 / x\n",
        "base_input": [[0]],
        "plus_input": [],
    }
    data = write_data(tmp_path / "a.jsonl", [row])
    done = treegen(
        f"eval mbpp-plus -M demo --data {data} --n-samples 5 --max-tokens 8 -o {tmp_path}/run"
        " --allow-code-execution"
    )
    judging = done.document["runs"][0]["judging"]
    assert judging["judge_errors"] == 5 and judging["judged"] == 0
    assert "reference solution of f fails" in judging["errors"][0]["detail"]


HOSTILE = {
    "    while True:\n        pass\n": ProgramStatus.TIMEOUT,
    "    print('x' * 10**7)\n": ProgramStatus.OUTPUT_LIMIT,
    "    import os\n    while True:\n        os.fork()\n": ProgramStatus.RUNTIME_ERROR,
    "    return [0] * 10**9\n": ProgramStatus.MEMORY_LIMIT,
    f"    return '{'x' * 10**7}'\n": ProgramStatus.RUNTIME_ERROR,
    "    import os; os._exit(0)\n": ProgramStatus.RUNTIME_ERROR,
    "    raise SystemExit\n": ProgramStatus.RUNTIME_ERROR,
    f"    return {'(' * 10**6}\n": ProgramStatus.COMPILE_ERROR,
}


def test_hostile_programs_cost_bounded_time() -> None:
    task = HumanEval()
    task.load(TaskOptions(ids=["HumanEval/53"], extra={"timeout": "1"}))
    found = run(task, [("HumanEval/53", text) for text in HOSTILE])
    assert [result.verdict for result in found] == list(HOSTILE.values())


def test_a_run_from_the_command_line(tmp_path: Path, treegen: Command) -> None:
    out = tmp_path / "run"
    done = treegen(
        f"eval humaneval-plus -M demo --limit 2 --n-samples 3 --max-tokens 24 -o {out}"
        " --allow-code-execution"
    )
    assert done.code == 0 and len(samples_of(out)) == 6
    report = done.document["runs"][0]["report"]
    rows = {(row["filter"], row["metric"]) for row in report["metrics"]}
    assert {("plus", "pass@1"), ("base", "pass@1"), ("plus", "pass@3")} <= rows
    assert done.document["runs"][0]["judging"]["judge_errors"] == 0
