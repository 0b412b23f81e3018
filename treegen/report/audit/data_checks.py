"""Finds duplicate problems, unusable references, and references that the scorer rejects."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from treegen.errors import TreegenError
from treegen.evals.problem import Problem
from treegen.evals.task_calls import wrap_task_method
from treegen.report.audit.answers import references_of
from treegen.report.audit.findings import Finding, find
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
# Items with a faulty prompt, example or solution, according to openai/human-eval (pull request 23)
# and evalplus/evalplus (issue 12) on GitHub.
_FAULTY: Final = {f"HumanEval/{n}" for n in (32, 38, 41, 47, 50, 57, 64, 67, 75, 83, 116)}
_CHECKED: Final = 2000  # references that are scored, because comparing formulas takes time


def audit_data(view: RunView, kind: str, *, quick: bool = False) -> Iterator[Finding]:
    """Yield the findings on the problems of a run.

    Args:
        view: The run.
        kind: The kind of its answers.
        quick: Whether to leave out references that a user's own task scores.
    """
    problems = [problem for problem in view.problems if problem.question]
    if not problems:
        return
    yield from _duplicates(view, problems)
    yield from _references(problems, kind)
    faulty = [p for p in problems if p.id in _FAULTY]
    yield from _find("known-faulty-items", faulty, problems)
    is_scored_by_text = kind in ("number", "choice", "mathematics", "text")
    if is_scored_by_text and view.job is not None and "imported" not in view.info.identity:
        if quick and not type(view.job.task).__module__.startswith("treegen.tasks."):
            return
        checked = view.job.data.problems[:_CHECKED]
        rejected = [(p.id, f"{p.answer!r}: {p.question}") for p in checked if _rejects(view, p)]
        yield from find("reference-rejected", rejected, len(checked), unit="problems")


def _find(
    name: str, cases: Sequence[ProblemView], problems: Sequence[ProblemView]
) -> Iterator[Finding]:
    """Yield a finding on problems."""
    texts = [(p.id, f"{p.reference}: {p.question}") for p in cases]
    yield from find(name, texts, len(problems), unit="problems")


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
    copies = [p for group in alike if len({p.answer for p in group}) == 1 for p in group[1:]]
    apart = [p for group in alike if len({p.answer for p in group}) > 1 for p in group]
    yield from _find("duplicate-problems", copies, problems)
    yield from _find("contradicting-references", apart, problems)


def _references(problems: Sequence[ProblemView], kind: str) -> Iterator[Finding]:
    golds = {p.id: references_of(p.answer) for p in problems}
    empty = [p for p in problems if not any(gold.strip() for gold in golds[p.id])]
    if len(empty) < len(problems):
        yield from _find("no-reference", empty, problems)
    several = [p for p in problems if len({squad_form(gold) for gold in golds[p.id]}) > 1]
    yield from _find("several-references", several, problems)
    if kind == "number":
        unclear = [p for p in problems if all(value_of(gold) is None for gold in golds[p.id])]
        unclear = [p for p in unclear if p not in empty]
        yield from _find("ambiguous-reference", unclear, problems)
    if kind == "choice":
        equal = [p for p in problems if _has_equal_choices(p.question)]
        yield from _find("equal-choices", equal, problems)
        letter, most = Counter(p.answer for p in problems).most_common(1)[0]
        if len(problems) >= 20 and most >= 0.8 * len(problems):
            same = [p for p in problems if p.answer == letter]
            yield from _find("one-letter-is-right", same, problems)


def _has_equal_choices(question: str) -> bool:
    texts = [*choices_of(question).values()]
    return len(texts) > 1 and (len(set(texts)) < len(texts) or "" in texts)


def _rejects(view: RunView, problem: Problem) -> bool:
    """Return whether the scorer finds no form of a reference right."""
    if (job := view.job) is None:
        return False
    golds, solution = references_of(problem.answer), problem.metadata.get("solution")
    texts = [form.format(gold) for form in _STATED for gold in golds]
    texts += [solution] if isinstance(solution, str) else []
    score = wrap_task_method(job.task.score, job.task.name)
    for text in texts:
        try:
            verdict = score(problem, text).get(job.task.filters[0])
        except TreegenError:
            return False  # this task cannot score a text
        if verdict is None or verdict.correct:
            return False
    return bool(texts)
