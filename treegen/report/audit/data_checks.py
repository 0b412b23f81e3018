"""Finds duplicate and faulty problems, unusable references, and references that are rejected."""

import hashlib
import json
from base64 import b64decode
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

from treegen.common.files import read_limited
from treegen.errors import InputError, TreegenError
from treegen.evals.job import Job
from treegen.evals.problem import Problem
from treegen.evals.task_calls import wrap_task_method
from treegen.report.audit import Severity, read_rows
from treegen.report.audit.answers import references_of
from treegen.report.audit.findings import Finding, find
from treegen.report.audit.readers import choices_of, squad_form, value_of
from treegen.report.view import ProblemView, RunView, Sample

# Forms in which a text may state a reference; a scorer should read one of them.
_ANSWER_FORMS: Final = (
    "{}",
    "The answer is {}.",
    "The final answer is $\\boxed{{{}}}$.",
    "Answer: {}",
    "#### {}",
    "Final Answer: The final answer is ${}$. I hope it is correct.",
)
_MAX_CHECKED: Final = 2000  # references that are scored, because comparing formulas takes time
_MIN_TRIED: Final = 20  # references without an accepted form after which the format is unknown
_MIN_ACCEPTED_SHARE: Final = (
    0.9  # the share of accepted references from which a rejected one is an error
)
_MAX_BYTES: Final = 16 << 20  # of a file of ids
_HASH_DIGITS: Final = 12  # of the hashes in published.jsonl, 6 bytes


def audit_data(
    view: RunView,
    kind: str,
    prompts: Mapping[str, str],
    *,
    faulty: dict[str, str] | None = None,
    quick: bool = False,
) -> Iterator[Finding]:
    """Yield the findings on the problems of a run.

    Args:
        view: The run.
        kind: The kind of its answers.
        prompts: Its prompts, from `prompt_texts`.
        faulty: Ids of faulty problems, from `read_faulty_ids`.
        quick: Whether to leave out references, which the task scores.
    """
    problems = [problem for problem in view.problems if problem.question]
    if not problems:
        return
    yield from _check_duplicates(view, problems, prompts)
    yield from _check_references(problems, kind)
    reasons = [(p, why_faulty(p, faulty or {})) for p in problems]
    listed = [(p.id, f"{why}: {p.reference}: {p.question}") for p, why in reasons if why]
    yield from find("known-faulty-items", listed, len(problems), unit="problems")
    yield from _check_published(view.task, problems)
    is_scored_by_text = kind in ("number", "choice", "mathematics", "text")
    if is_scored_by_text and not quick and view.job is not None and not _is_imported(view):
        yield from _find_rejected(view.job)


def _is_imported(view: RunView) -> bool:
    return "imported" in view.info.identity


def _find(
    name: str,
    cases: Sequence[ProblemView],
    problems: Sequence[ProblemView],
    severity: Severity | None = None,
) -> Iterator[Finding]:
    """Yield a finding on problems; the arguments are as those of `find`."""
    texts = [(p.id, f"{p.reference}: {p.question}") for p in cases]
    yield from find(name, texts, len(problems), unit="problems", severity=severity)


def _check_duplicates(
    view: RunView, problems: Sequence[ProblemView], prompts: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield findings on problems with equal questions, prompts, choices and images.

    The question alone may be a stem whose choices or passage only the prompt has. An imported log
    may have no prompts, and then its findings are low.
    """
    more: dict[str, list[str]] = {}
    if view.job is not None:  # choices and images also make a problem
        more = {
            p.id: [*p.candidates, *(i.sha256 for i in p.images)] for p in view.job.data.problems
        }
    groups: dict[tuple[str | int, ...], list[ProblemView]] = defaultdict(list)
    for problem in problems:
        question = " ".join(problem.question.casefold().split())
        prompt = " ".join(prompts.get(problem.id, "").casefold().split())
        groups[(question, hash(prompt), *more.get(problem.id, ()))].append(problem)
    duplicates = [group for group in groups.values() if len(group) > 1]
    copies = [p for group in duplicates if len({p.answer for p in group}) == 1 for p in group[1:]]
    unlike = [p for group in duplicates if len({p.answer for p in group}) > 1 for p in group]
    for name, cases in (("duplicate-problems", copies), ("contradicting-references", unlike)):
        is_whole = not _is_imported(view) or all(p.id in prompts for p in cases)
        yield from _find(name, cases, problems, None if is_whole else "low")


def _check_references(problems: Sequence[ProblemView], kind: str) -> Iterator[Finding]:
    golds = {p.id: references_of(p.answer) for p in problems}
    empty = [p for p in problems if not any(gold.strip() for gold in golds[p.id])]
    # Of a question without an answer, the empty text is the answer.
    scored = {s.problem_id for p in empty for s in p.samples if _is_right_anywhere(s)}
    unusable = [p for p in empty if p.id not in scored]
    if len(empty) < len(problems):
        severity: Severity | None = "low" if kind in ("text", "none") else None
        yield from _find("no-reference", unusable, problems, severity)
    several = [p for p in problems if len({squad_form(gold) for gold in golds[p.id]}) > 1]
    yield from _find("several-references", several, problems)
    if kind == "number":
        empty_ids = {p.id for p in empty}
        unclear = [
            p
            for p in problems
            if p.id not in empty_ids and all(value_of(gold) is None for gold in golds[p.id])
        ]
        yield from _find("ambiguous-reference", unclear, problems)
    if kind == "choice":
        equal = [p for p in problems if _has_equal_choices(p)]
        yield from _find("equal-choices", equal, problems)
        letter, count = Counter(p.answer for p in problems).most_common(1)[0]
        if len(problems) >= 20 and count >= 0.8 * len(problems):
            same = [p for p in problems if p.answer == letter]
            yield from _find("one-letter-is-right", same, problems)


def _is_right_anywhere(sample: Sample) -> bool:
    return any(verdict.correct for verdict in (sample.verdicts or {}).values())


def _has_equal_choices(problem: ProblemView) -> bool:
    """Return whether two choices of a question are equal, or some but not all are empty."""
    if problem.images:
        return False
    texts = [" ".join(text.split()) for text in choices_of(problem.question).values()]
    return any(texts) and (len(set(texts)) < len(texts) or "" in texts)


def _find_rejected(job: Job) -> Iterator[Finding]:
    """Yield a finding on references that the scorer does not find right in any form.

    Each form that accepted a reference is tried first for the next one. If the scorer accepts few
    references, it reads a form that is unknown here, so only solutions of the data count.
    """
    forms, checked = list(_ANSWER_FORMS), job.data.problems[:_MAX_CHECKED]
    rejected: list[Problem] = []
    for index, problem in enumerate(checked):
        golds = references_of(problem.answer)
        if not golds or _is_object(problem.answer):
            continue
        if index < _MIN_TRIED or len(rejected) <= (1 - _MIN_ACCEPTED_SHARE) * index:
            accepting = _find_accepted_form(job, problem, forms, golds)
            if accepting is None:
                return  # this task cannot score a text
            if accepting:
                forms.remove(accepting)
                forms.insert(0, accepting)
                continue
        rejected.append(problem)
    if len(rejected) > (1 - _MIN_ACCEPTED_SHARE) * len(checked):
        rejected = [problem for problem in rejected if _rejects_solution(job, problem)]
    cases = [(p.id, f"{p.answer!r}: {p.question}") for p in rejected]
    yield from find("reference-rejected", cases, len(checked), unit="problems")


def _is_object(answer: str) -> bool:
    """Return whether a reference is a JSON object, whose form only its task knows."""
    with suppress(ValueError, RecursionError):
        return isinstance(json.loads(answer), dict)
    return False


def _find_accepted_form(
    job: Job, problem: Problem, forms: Sequence[str], golds: Sequence[str]
) -> str | None:
    """Return the first form of a reference that is scored right; "" if none is.

    Args:
        job: The run's task and problems.
        problem: The problem.
        forms: The forms of texts.
        golds: The references.

    Returns:
        The form; None if the task cannot score a text.
    """
    for form in forms:
        for gold in golds:
            is_right = _is_right(job, problem, form.format(gold))
            if is_right is None:
                return None
            if is_right:
                return form
    return ""


def _rejects_solution(job: Job, problem: Problem) -> bool:
    solution: Any = problem.metadata.get("solution")
    is_text = isinstance(solution, str) and bool(solution)
    return is_text and _is_right(job, problem, solution) is False


def _is_right(job: Job, problem: Problem, text: str) -> bool | None:
    """Return the verdict of the first filter; None if there is none."""
    try:
        verdict = wrap_task_method(job.task.score, job.task.name)(problem, text)
    except TreegenError:
        return None
    first = verdict.get(job.task.filters[0])
    return None if first is None else first.correct


def hash_question(question: str) -> str:
    """Return a hash of the letters and digits of a question and its choices."""
    letters = "".join(filter(str.isalnum, question.casefold()))
    return hashlib.sha256(letters.encode()).hexdigest()[:16]


@cache
def _read_faulty() -> dict[str, str]:
    """Return what is wrong with the items of faulty.jsonl, by id or by `hash_question`.

    HumanEval: items with a faulty example, test or solution; those whose prompt has only a spelling
    error are left out. MMLU: all items that MMLU-Redux marks, of 100 in each subject.
    """
    lists = read_rows("faulty.jsonl")
    return {
        item: f"{entry['what']} ({entry['source']})" for entry in lists for item in entry["items"]
    }


def read_faulty_ids(path: Path) -> dict[str, str]:
    """Return the ids of problems in a file, each with the name of the file.

    Args:
        path: A text file with one id in each line. Empty lines, and those that begin with "#", are
            skipped.

    Raises:
        InputError: the file cannot be read, is no text, is larger than 16 MiB, or has no id.
    """
    try:
        lines = map(str.strip, read_limited(path, _MAX_BYTES).decode("utf-8-sig").splitlines())
    except UnicodeDecodeError:
        raise InputError(
            f"the file {path} is not valid UTF-8; write one problem id per line"
        ) from None
    ids = {line: path.name for line in lines if line and not line.startswith("#")}
    if not ids:
        raise InputError(f"the file {path} contains no problem ids; write one problem id per line")
    return ids


def why_faulty(problem: ProblemView, listed: dict[str, str]) -> str | None:
    """Return why a problem is faulty and who says so; None if no list has it.

    Args:
        problem: The problem.
        listed: Further ids, from `read_faulty_ids`.
    """
    published = _read_faulty()
    return (
        listed.get(problem.id)
        or published.get(problem.id)
        or published.get(hash_question(problem.question))
    )


@cache
def _read_published() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the name of the data and names of its tasks, by the hash of a question.

    A line of published.jsonl has the hashes of one split: the first 6 bytes of `hash_question`, in
    base64.
    """
    published: dict[str, tuple[str, tuple[str, ...]]] = {}
    for split in read_rows("published.jsonl"):
        digits = b64decode(split["items"]).hex()
        names = f"{split['name']} ({split['split']})", tuple(split["tasks"])
        starts = range(0, len(digits), _HASH_DIGITS)
        published |= dict.fromkeys((digits[i : i + _HASH_DIGITS] for i in starts), names)
    return published


def _check_published(task: str, problems: Sequence[ProblemView]) -> Iterator[Finding]:
    """Yield a finding on problems that were published under another name than the task's."""
    published, cases = _read_published(), []
    for problem in problems:
        name, tasks = published.get(hash_question(problem.question)[:_HASH_DIGITS], ("", ()))
        if name and not any(task_name in task.casefold() for task_name in tasks):
            cases.append((problem.id, f"{name}: {problem.question}"))
    yield from find("published-elsewhere", cases, len(problems), unit="problems")
