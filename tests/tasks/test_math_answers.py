"""Answers as mathematics: what is equal, classes, hostile texts, and a missing package."""

import itertools
import random
import resource
from pathlib import Path

import pytest
from cli_cases import Command, write_jsonl

from treegen.common.bounded.worker import FileWorker
from treegen.errors import InputError
from treegen.evals.verdict import Verdict
from treegen.runs.record_format import decode_record, encode_record
from treegen.tasks.answers import MathAnswer
from treegen.tasks.answers import maths as module
from treegen.tasks.answers.canonical import MAX_ANSWER

pytest.importorskip("math_verify")
INVALID = Verdict(None, False)


@pytest.fixture(scope="module")
def kind() -> MathAnswer:
    return MathAnswer()


@pytest.mark.parametrize(
    ("text", "reference", "want"),
    [
        (r"So \boxed{\frac{1}{2}}", "0.5", True),
        (r"The answer is $\frac12$.", r"\frac{1}{2}", True),
        (r"$\frac12$", "$0.5$", True),
        ("It is 1/2", "0.5", True),
        (r"\boxed{3,2}", "2,3", True),
        (r"\boxed{(-\infty,3]}", "x \\le 3", True),
        (r"\boxed{(-\infty,3)}", "(-\\infty,3]", False),
        (r"\boxed{10\text{ cm}}", "10", True),
        (r"\boxed{25\pi}", "25", False),
        ("", "1", False),
        ("no idea", "1", False),
        ("\ud800 $1$", "1", True),
    ],
)
def test_equality(kind: MathAnswer, text: str, reference: str, want: bool) -> None:
    assert kind.verdict(text, [reference]).correct is want
    assert kind.verdict(text, ["77", reference]).correct is want


def test_answers_are_stored_as_read(kind: MathAnswer) -> None:
    texts = [r"\boxed{\dfrac 34}", "so 0.5%", r"\boxed{x=3}", r"$1$ and $2$", r"\boxed{042}"]
    answers = [kind.verdict(text, ["7"]).answer for text in texts]
    assert answers == ["\\frac{3}{4}", "0.5%", "x=3", "1 and 2", "042"]
    assert kind.verdict("nothing here", ["7"]) == INVALID


def test_classes_do_not_depend_on_the_order(kind: MathAnswer) -> None:
    groups = [
        {"0.5", "\\frac{1}{2}", "1/2", "\\frac{2}{4}"},
        {"x+1", "1+x"},
        {"\\sqrt{8}", "2\\sqrt{2}"},
        {"\\{1,2\\}", "2,1"},
        {"7"},
        {"\\text{red}"},
    ]
    answers = list(itertools.chain.from_iterable(groups))
    for seed in range(5):
        random.Random(seed).shuffle(answers)
        found = kind.representatives(answers) if seed % 2 else MathAnswer().representatives(answers)
        assert set(found) == set(answers)
        assert {frozenset(a for a in answers if found[a] == top) for top in found.values()} == set(
            map(frozenset, groups)
        )
        assert found["\\frac{2}{4}"] == "0.5"


HOSTILE = {
    "braces": r"\boxed{" + "{" * 10**6 + "1" + "}" * 10**6 + "}",
    "few braces": r"\boxed{" + "{" * 3000 + "1" + "}" * 3000 + "}",
    "10 MB": "1" * 10_000_000,
    "power": r"\boxed{10^{10^{10}}}",
    "tower": "so 9**9**9**9",
    "factorial": r"\boxed{(10^{7})!}",
    "binomial": r"\boxed{\binom{10^9}{5\cdot10^8}}",
    "fractions": r"\boxed{" + r"\frac{1}{" * 400 + "2" + "}" * 400 + "}",
    "sum": r"\boxed{\sum_{i=1}^{10^{9}} i^{i}}",
    "regex": "1 2 3 4 5 6 7 8 9 " * 5000,
    "unclosed": r"\boxed{" * 8000,
    "matrix": r"\boxed{\begin{pmatrix}" + "1&" * 2000 + r"1\end{pmatrix}}",
    "expand": r"\boxed{(a+b+c+d+e)^{500}}",
}


def cpu_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.mark.slow
def test_hostile_texts_cost_under_a_second_each_and_have_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def spent(texts: list[str]) -> float:
        """Return the CPU time of a process that judges some texts, from its start to its end."""
        worker = FileWorker(
            module._FILE,
            MAX_ANSWER,
            seconds=module.SECONDS / 2,
            memory=2 << 30,
            what="",
            site=True,
        )
        monkeypatch.setattr(module, "_WORKER", worker)
        before = cpu_of_children()
        for text in texts:
            assert MathAnswer().verdict(text, [r"\frac{\pi}{3}+x"]) == INVALID, text[:40]
        assert MathAnswer().verdict(r"\boxed{42}", ["42"]) == Verdict("42", True)
        worker._drop()
        return cpu_of_children() - before

    texts = list(HOSTILE.values())
    assert spent(texts) - spent([]) < 1.0 * len(texts)


def test_slow_comparisons_leave_answers_apart(
    kind: MathAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = []

    class Slow:
        def ask(self, request: list[str]) -> None:
            requests.append(request)

    monkeypatch.setattr(module, "_WORKER", Slow())
    answers = [f"x_{i}" for i in range(20)]
    assert MathAnswer().representatives(answers) == {answer: answer for answer in answers}
    assert len(requests) <= module.STRIKES * len(answers) / 2
    assert MathAnswer().verdict("$1$", ["1"]) == INVALID


def test_without_the_package_one_line_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, treegen: Command, elsewhere: None, no_weights: None
) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    for call in (MathAnswer().ready, lambda: MathAnswer().verdict("1", ["1"])):
        with pytest.raises(InputError, match=r"pip install '.\[math\]'"):
            call()
    error = treegen("eval", "aime", "--model", "demo", "--max-tokens", "8").error
    assert "install it with: pip install '.[math]' in" in error


TEXTS = ("$\\frac12$", "0.5", "it is 1/2", "$2$", "the answer is 3", "$\\boxed{2.0}$", "?", "$3$")


def test_votes_tables_and_reports_count_equal_answers_as_one(
    treegen: Command, tiny: Path, tmp_path: Path
) -> None:
    data = write_jsonl(tmp_path / "data.jsonl", [{"id": "a", "question": "q", "answer": "1/2"}])
    run = tmp_path / "run"
    options = ["--data", data, "-T", "answer=math", "--n-samples", 8, "--max-tokens", 2, "--maj"]
    assert treegen("eval", "jsonl", *options, "1,3,8", "-M", tiny, "-o", run, "-q").code == 0
    samples = run / "samples.jsonl"
    lines = samples.read_bytes().splitlines()
    documents = []
    for seed in range(3):
        texts = list(TEXTS)
        random.Random(seed).shuffle(texts)
        rows = [decode_record(line) | {"text": t} for line, t in zip(lines, texts, strict=True)]
        samples.write_bytes(b"".join(map(encode_record, rows)))
        report = treegen("score", run).document["runs"][0]["report"]
        majority = {row["k"]: (row["value"], row["tie_rate"]) for row in report["majority"]}
        assert majority[1][0] == 3 / 8
        assert majority[8] == (1.0, 0.0)
        shown = treegen("show", run, "--problem", "a").document
        assert shown["vote"] == {"answer": "0.5", "votes": 3, "tied": ["0.5"]}
        answers = sorted(str(sample["answer"]) for sample in shown["samples"])
        assert answers == ["0.5"] * 3 + ["2"] * 2 + ["3"] * 2 + ["None"]
        documents.append((report["metrics"], majority))
    assert documents[0] == documents[1] == documents[2]
