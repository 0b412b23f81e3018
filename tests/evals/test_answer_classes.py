"""Classes of equal answers: what they are, and that votes and reports count them as one."""

import random
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import pytest

from treegen.errors import InputError
from treegen.evals.verdict import (
    AnswerType,
    Verdict,
    check_ready,
    group_equal_answers,
    unify_answers,
)
from treegen.tasks import get_task


def near(first: str, second: str) -> bool:
    """Numbers that differ by one at most: equality that is not transitive."""
    return abs(int(first) - int(second)) <= 1


def joined(edges: Collection[tuple[str, str]], first: str, second: str) -> bool:
    return (first, second) in edges


def test_classes_are_the_connected_parts_whatever_the_order() -> None:
    answers = ["1", "2", "3", "12", "11", "7", "20"]
    want = {"1": "1", "2": "1", "3": "1", "11": "11", "12": "11", "7": "7", "20": "20"}
    for seed in range(20):
        random.Random(seed).shuffle(answers)
        assert group_equal_answers(answers, near) == want
        assert group_equal_answers([*answers, *answers], near) == want
        # It is enough that two answers are equal in one order.
        assert group_equal_answers(answers, lambda a, b: near(a, b) and int(a) > int(b)) == want
    assert group_equal_answers([], near) == {}


def test_random_classes_follow_from_the_answers_alone() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        answers = [str(draw.randrange(60)) for _ in range(draw.randrange(40))]
        edges = {(draw.choice(answers or ["0"]), draw.choice(answers or ["0"])) for _ in range(15)}
        found = group_equal_answers(answers, partial(joined, edges))
        for first, second in edges & {(a, b) for a in answers for b in answers}:
            assert found[first] == found[second]
        for members in ({a for a in found if found[a] == top} for top in found.values()):
            assert min(members, key=lambda a: (len(a), a)) in found.values()
            assert len({found[member] for member in members}) == 1
        draw.shuffle(answers)
        assert found == group_equal_answers(answers, partial(joined, edges))


class Near:
    """An answer type of integers."""

    def verdict(self, text: str, references: Sequence[str]) -> Verdict:
        return Verdict(text, text in references)

    def representatives(self, answers: Collection[str]) -> Mapping[str, str]:
        return group_equal_answers(answers, near)


def test_right_and_wrong_answers_are_never_one_class() -> None:
    right, wrong = Verdict("3", True), Verdict("2", False)
    more = [Verdict("4", False), Verdict("5", False), Verdict(None, False)]
    verdicts = [right, wrong, *more]
    found = [("a", {"near": verdict, "text": verdict}) for verdict in verdicts]
    found.append(("b", {"near": Verdict("5", False), "text": Verdict("5", False)}))
    after = unify_answers(found, {"near": Near()})
    assert [v["near"].answer for v in after] == ["3", "2", "4", "4", None, "5"]
    assert [v["near"].correct for v in after] == [True] + [False] * 5
    assert [v["text"] for v in after] == [*verdicts, Verdict("5", False)]


def test_tasks_need_no_answer_types_and_may_have_some_that_need_nothing() -> None:
    assert isinstance(Near(), AnswerType)
    assert get_task("simpleqa").answer_types == {}
    check_ready({"near": Near()})


TASK = """
from treegen.tasks import *
from treegen.tasks.answers import NumberAnswer
from treegen.common.params import SamplingParams

class Mine:
    name, version, filters = "mine", "1", ("answer",)
    answer_types = {types}
    defaults = TaskDefaults(SamplingParams(), 1, 0)
    def load(self, options): ...
    def tree(self, data, num_samples): ...
    def score(self, problem, text): ...
    def aggregate(self, scores, options): ...
"""


@pytest.mark.parametrize(
    ("types", "message"),
    [
        ('{"answer": NumberAnswer()}', ""),
        ('{"other": NumberAnswer()}', "must be a mapping from filters"),
        ('{"answer": int}', "answer type for answer must have the methods verdict and"),
        ("NumberAnswer()", "must be a mapping from filters"),
    ],
)
def test_declared_answer_types_are_checked(tmp_path: Path, types: str, message: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(TASK.replace("{types}", types), encoding="ascii")
    if not message:
        assert list(get_task(f"{path}:Mine").answer_types) == ["answer"]
        return
    with pytest.raises(InputError, match=message):
        get_task(f"{path}:Mine")
