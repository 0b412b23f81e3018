"""Finds duplicate problems, unusable references, and references that the scorer rejects."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from treegen.errors import TreegenError
from treegen.evals.problem import Problem
from treegen.report.audit.answers import references_of
from treegen.report.audit.findings import Finding, name_some, severity_of
from treegen.report.audit.readers import choices_of, squad_form, value_of
from treegen.report.view import ProblemView, RunView

# Forms in which a text may state a reference; a scorer should read one of them.
_STATED: Final = (
    "{}",
    "The answer is {}.",
    "The final answer is $\\boxed{{{}}}$.",
    "Answer: {}",
    "#### {}",
    "Final Answer: The final answer is ${}$. I hope it is correct.",
)
# Items whose prompt, example or solution is known to be faulty, by the start of their ids. The ones
# of HumanEval are in https://github.com/openai/human-eval/pull/23 and
# https://github.com/evalplus/evalplus/issues/12.
_FAULTY: Final = {"HumanEval/": ("32", "38", "41", "47", "50", "57", "64", "67", "75", "83", "116")}
_CHECKED: Final = 2000  # references that are scored, because comparing formulas takes time


def audit_data(view: RunView, kind: str) -> Iterator[Finding]:
    """Yield the findings on the problems of a run.

    Args:
        view: The run.
        kind: The kind of its answers.
    """
    problems = [problem for problem in view.problems if problem.question]
    if not problems:
        return
    yield from _duplicates(view, problems)
    yield from _references(problems, kind)
    names = {f"{start}{number}" for start, numbers in _FAULTY.items() for number in numbers}
    if faulty := [problem for problem in problems if problem.id in names]:
        yield _finding(
            faulty[0],
            f"{name_some([problem.id for problem in faulty], 20)}: {faulty[0].question}",
            (len(faulty), len(problems), 2.0, 2.0),
            "known-faulty-items",
            "users have reported the prompt, the examples or the solution of these items as faulty",
            "report the score without them too",
        )
    if kind in ("number", "choice", "mathematics", "text") and view.job is not None:
        yield from _rejected(view)


def _duplicates(view: RunView, problems: Sequence[ProblemView]) -> Iterator[Finding]:
    more: dict[str, list[str]] = {}
    if view.job is not None:  # choices and images also make a problem
        more = {
            p.id: [*p.candidates, *(i.sha256 for i in p.images)] for p in view.job.data.problems
        }
    groups: dict[tuple[str, ...], list[ProblemView]] = defaultdict(list)
    for problem in problems:
        question = " ".join(problem.question.casefold().split())
        groups[(question, *more.get(problem.id, ()))].append(problem)
    alike = [group for group in groups.values() if len(group) > 1]
    apart = [group for group in alike if len({p.answer for p in group}) > 1]
    for cases, name, message, advice, high, medium in (
        (
            apart,
            "contradicting-references",
            "the same question is there with different references, so one of them scores 0",
            "correct or remove these problems",
            0.0,
            0.0,
        ),
        (
            [group for group in alike if group not in apart],
            "duplicate-problems",
            "the same problem is there more than once, so it counts more than once",
            "remove the copies; the intervals assume independent problems",
            0.1,
            0.01,
        ),
    ):
        if cases:
            count = sum(len(group) - 1 for group in cases)
            ids = name_some([problem.id for problem in cases[0]])
            yield _finding(
                cases[0][0],
                f"{ids}: {cases[0][0].question}",
                (count, len(problems), high, medium),
                name,
                message,
                advice,
            )


def _references(problems: Sequence[ProblemView], kind: str) -> Iterator[Finding]:
    empty = [p for p in problems if not any(g.strip() for g in references_of(p.answer))]
    if empty and len(empty) < len(problems):
        yield _finding(
            empty[0],
            empty[0].question,
            (len(empty), len(problems), 0.01, 0.0),
            "no-reference",
            "the problem has no reference answer, so every sample of it is wrong",
            "add the reference, or leave the problem out",
        )
    several = [
        p
        for p in problems
        if len(golds := references_of(p.answer)) > 1 and len({squad_form(g) for g in golds}) > 1
    ]
    if several:
        yield _finding(
            several[0],
            f"{several[0].reference}: {several[0].question}",
            (len(several), len(problems), 2.0, 2.0),
            "several-references",
            "the problem has several right answers, and one of them is enough",
            "say so beside the score; other tools may compare with the first one only",
        )
    if kind == "number":
        unclear = [p for p in problems if all(value_of(g) is None for g in references_of(p.answer))]
        unclear = [p for p in unclear if p not in empty]
        if unclear:
            yield _finding(
                unclear[0],
                f"{unclear[0].reference}: {unclear[0].question}",
                (len(unclear), len(problems), 0.05, 0.0),
                "ambiguous-reference",
                "the reference is not a number as those of the other problems are",
                "correct the reference, or leave the problem out",
            )
    if kind == "choice":
        equal = [p for p in problems if _has_equal_choices(p.question)]
        if equal:
            yield _finding(
                equal[0],
                equal[0].question,
                (len(equal), len(problems), 0.05, 0.0),
                "equal-choices",
                "two choices are equal or empty, so more than one letter may be right",
                "correct the choices, or leave the problem out",
            )
    golds = Counter(p.answer for p in problems)
    if kind == "choice" and len(problems) >= 20:
        letter, most = golds.most_common(1)[0]
        if most >= 0.8 * len(problems):
            yield _finding(
                problems[0],
                f"{letter} is the reference of {most:,} problems",
                (most, len(problems), 2.0, 0.0),
                "one-letter-is-right",
                "nearly all references are one letter, so a constant answer scores high",
                "shuffle the choices",
            )


def _has_equal_choices(question: str) -> bool:
    texts = [*choices_of(question).values()]
    return len(texts) > 1 and (len(set(texts)) < len(texts) or "" in texts)


def _rejected(view: RunView) -> Iterator[Finding]:
    job = view.job
    if job is None or job.task.name == "imported" or "imported" in view.info.identity:
        return
    headline = job.task.filters[0]
    problems = job.data.problems[:_CHECKED]
    rejected = [problem for problem in problems if not _accepts(view, problem, headline)]
    if rejected:
        problem = rejected[0]
        seen = next((p for p in view.problems if p.id == problem.id), ProblemView(problem.id))
        yield _finding(
            seen,
            f"reference {problem.answer!r}: {problem.question}",
            (len(rejected), len(problems), 0.0, 0.0),
            "reference-rejected",
            "the scorer does not accept the reference answer itself, so every sample is wrong",
            "correct the reference, or the scorer",
        )


def _accepts(view: RunView, problem: Problem, headline: str) -> bool:
    assert view.job is not None
    golds = references_of(problem.answer)
    solution = problem.metadata.get("solution")
    texts = [form.format(gold) for form in _STATED for gold in golds]
    texts += [solution] if isinstance(solution, str) else []
    for text in texts:
        try:
            verdicts = view.job.task.score(problem, text)
        except TreegenError:
            return True  # this task cannot score a text
        if headline not in verdicts or verdicts[headline].correct:
            return True
    return not texts


def _finding(
    problem: ProblemView,
    example: str,
    numbers: tuple[int, int, float, float],
    kind: str,
    message: str,
    advice: str,
) -> Finding:
    """Return a finding on problems.

    Args:
        problem: The problem of the example.
        example: Its text.
        numbers: The count, the total, and the shares from which it is high and medium.
        kind: The name of the finding.
        message: What is wrong.
        advice: What to do.
    """
    count, total, high, medium = numbers
    return Finding(
        kind=kind,
        area="data",
        severity=severity_of(count, total, high=high, medium=medium),
        count=count,
        total=total,
        unit="problems",
        message=message,
        advice=advice,
        example=example,
        problem_id=problem.id,
    )
