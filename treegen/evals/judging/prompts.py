"""Prompts of a judge run: one for each answer or pair of answers, wording and criterion.

Prompts are flat texts; treegen finds their shared prefixes in the tokens. All prompts of a wording
share the rubric, those of a problem the question, those of an answer's criteria the answer, and
repeats the whole prompt. An answer stands between marks that it cannot forge.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final

from treegen.errors import InputError
from treegen.evals.job import Job
from treegen.evals.judging.judgement_files import Slot
from treegen.evals.judging.settings import JudgeRun
from treegen.evals.thinking import get_answer_text
from treegen.runs import RunDir

# Texts that address the judge instead of the asker of the question. They only flag an answer.
_INJECTION_PATTERNS: Final = {
    "asks to ignore the instructions": re.compile(
        r"\b(ignore|disregard|forget|override|bypass)\b[^.\n]{0,40}\b(rubric|instruction|prompt|rule"
        r"|criteri\w+|guideline|above|previous)s?\b",
        re.IGNORECASE,
    ),
    "asks for a verdict": re.compile(
        r"\b(say|assign|award|output|return|reply|respond|rate|grade|score|choose|pick|select|mark"
        r"|give (it|this|me|the|my|full))\b[^.\n]{0,30}\b((10|ten)(?=\s*(/|out of|[.!,\"']|$))"
        r"|(full|max\w*|perfect|highest|top) (mark|score|rating|grade|point)s?|marks"
        r"|as correct|correct\"?$|answer [ab])\b",
        re.IGNORECASE | re.MULTILINE,
    ),
    "addresses the judge": re.compile(
        r"\b(dear|hey|hello|attention|note to( the)?|to( the)?|you are (the|a|an)|as (the|a|an))\s+"
        r"(\w+\s+)?(judge|grader|evaluator|rater|assessor|reviewer|examiner)\b",
        re.IGNORECASE,
    ),
    "writes a verdict": re.compile(
        r"\bverdict[*_`\"']*\s*[:=]|^[*_` \t]*+final (score|rating|grade)[*_`\s]*+:"
        r"|\[\[\s*(\d+(\.\d+)?|[ABC])\s*\]\]",
        re.IGNORECASE | re.MULTILINE,
    ),
    "writes the marks or special tokens of a prompt": re.compile(
        r"\bANSWER_[0-9a-f]{8}|<\|[^|<>\n]{1,40}\|>|</?s>|\[/?INST\]|<</?SYS>>"
        r"|<(start|end)_of_turn>|<(bos|eos)>"
    ),
}
# Cyrillic and Greek letters that look like Latin letters, in the order of the Latin letters.
_ALIKE: Final = str.maketrans(
    "\u0430\u0441\u0435\u0456\u0458\u043a\u043e\u0440\u0455\u0443\u0445"
    "\u0410\u0412\u0421\u0415\u041d\u0406\u0408\u041a\u041c\u041e\u0420\u0405\u0422\u0423\u0425"
    "\u03b1\u03b5\u03b9\u03ba\u03bd\u03bf\u03c1\u03c5\u03c7"
    "\u0391\u0392\u0395\u0396\u0397\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7",
    "aceijkopsyxABCEHIJKMOPSTYXaeikvopuxABEZHIKMNOPTYX",
)
# Markers that chat templates write around turns: <|im_start|>, <start_of_turn>, <think>, [INST].
_IN_TEMPLATE: Final = re.compile(r"<[^<>\s{}%'\"]{1,40}>|\[/?[A-Z_]{2,20}\]")


def addresses_judge(text: str) -> list[str]:
    """Return the ways in which an answer seems to address its judge; empty if there are none.

    Detection uses regular expressions, so it may flag an honest answer about grading and miss a
    veiled request. Letters that look like Latin letters are read as these, and invisible characters
    are ignored.
    """
    plain = _plain(text)
    return [what for what, pattern in _INJECTION_PATTERNS.items() if pattern.search(plain)]


def special_in_template(template: str) -> set[str]:
    """Return the texts with which a chat template marks turns and speakers."""
    return set(_IN_TEMPLATE.findall(template))


def quote_answer(text: str, mark: str, special: Sequence[str] = ()) -> str:
    """Return an answer between two marks, with the marks and special tokens inside it broken up.

    If the answer contains the mark or a special token, a space is inserted after its first
    character. If it contains them only in letters that tokenizers may normalize to plain letters,
    the answer is first normalized to plain letters (NFKC).

    Args:
        text: The answer.
        mark: Letters and digits of the mark. It is the same for all answers, so that prompts share
            the tokens before an answer.
        special: Special tokens of the judge's tokenizer, as texts.
    """
    forged = [token for token in sorted({mark, *special}, key=len, reverse=True) if len(token) > 1]
    folded = text if text.isascii() else unicodedata.normalize("NFKC", text)
    if any(token in folded and token not in text for token in forged):
        text = folded
    for token in forged:
        text = text.replace(token, f"{token[0]} {token[1:]}")
    return f"<<<{mark}\n{text}\n{mark}>>>"


def _plain(text: str) -> str:
    if text.isascii():
        return text
    folded = unicodedata.normalize("NFKC", text).translate(_ALIKE)
    return "".join(char for char in folded if unicodedata.category(char) != "Cf")


@dataclass(frozen=True, slots=True)
class JudgedCase:
    """The answers, wording and criterion of one prompt."""

    problem_id: str
    shown: tuple[tuple[int, int], ...]
    """The (run, sample) of each answer, in the order in which the prompt shows them."""
    wording: int
    criterion: int

    @property
    def id(self) -> str:
        """The id of the prompt, from which its random draws follow."""
        about = "-".join(f"{run}:{index}" for run, index in self.shown)
        return f"{self.problem_id}/{about}/{self.wording}/{self.criterion}"

    def slot(self, repeat: int) -> Slot:
        """Return the slot of one judgement of this prompt."""
        return self.shown, self.wording, self.criterion, repeat


class AnswerSet:
    """The answers of runs of the same problems, with questions and references.

    Attributes:
        questions, references, groups: The question, reference and group of each problem, by id.
        names: The names of the runs.
        texts: The text of each answer, by problem and (run, sample).
    """

    def __init__(self, jobs: Sequence[Job], runs: Sequence[RunDir]) -> None:
        """Read the samples of runs; the reasoning of a sample is not part of its answer.

        Args:
            jobs: The job of each run.
            runs: The runs, open for reading.

        Raises:
            InputError: there is no sample, or the runs have different problems.
        """
        problems = jobs[0].data.problems
        self.questions = {problem.id: problem.question for problem in problems}
        self.references = {problem.id: problem.answer for problem in problems}
        self.groups = {problem.id: problem.group for problem in problems}
        self.names = [run.path.name for run in runs]
        self.texts: dict[str, dict[tuple[int, int], str]] = {p.id: {} for p in problems}
        for number, (job, run) in enumerate(zip(jobs, runs, strict=True)):
            if {p.id: p.question for p in job.data.problems} != self.questions:
                raise InputError(
                    f"{run.path} and {runs[0].path} have different problems; compare runs of "
                    "the same problems"
                )
            for record in run.records():
                key = number, int(record["sample_index"])
                self.texts[record["problem_id"]][key] = get_answer_text(record)
        if not any(self.texts.values()):
            raise InputError(f"{runs[0].path} has no sample to judge; finish the run first")

    def all(self) -> Iterator[tuple[str, int, str]]:
        """Yield (problem, sample, text) of each answer.

        The problem text also names the run, except for the first run.
        """
        for problem_id, texts in self.texts.items():
            for (run, index), text in sorted(texts.items()):
                yield f"{problem_id} in {self.names[run]}" if run else problem_id, index, text

    def iterate_shown(self, *, pairs: bool) -> Iterator[tuple[str, tuple[tuple[int, int], ...]]]:
        """Yield (problem, shown answers) of each prompt: one answer, or a pair in either order.

        A pair consists of samples with the same index, so each sample is in equally many pairs.
        """
        for problem_id, texts in self.texts.items():
            if not pairs:
                for key in sorted(texts):
                    yield problem_id, (key,)
                continue
            runs = sorted({run for run, _ in texts})
            for first, second in combinations(runs, 2):
                for index in sorted(i for run, i in texts if run == first):
                    if (second, index) in texts:
                        yield problem_id, ((first, index), (second, index))
                        yield problem_id, ((second, index), (first, index))


def cases_of(answers: AnswerSet, judging: JudgeRun) -> list[JudgedCase]:
    """Return all prompts of a judge run, ordered so that neighbours share long prefixes."""
    settings = judging.settings
    criteria = range(max(1, len(settings.rubric.criteria)))
    return [
        JudgedCase(problem_id, answer_keys, wording, criterion)
        for wording in range(settings.wordings)
        for problem_id, answer_keys in answers.iterate_shown(pairs=settings.rubric.pairs)
        for criterion in criteria
    ]


def prompt_of(
    case: JudgedCase, answers: AnswerSet, judging: JudgeRun, special: Sequence[str]
) -> tuple[str, str]:
    """Return the system turn and the user turn of a prompt.

    Args:
        case: The answers, wording and criterion of the prompt.
        answers: The answers, questions and references of the runs.
        judging: The judge run.
        special: Special tokens of the judge's tokenizer, which no answer may forge.
    """
    rubric = judging.settings.rubric
    texts = [
        quote_answer(answers.texts[case.problem_id][key], judging.mark, special)
        for key in case.shown
    ]
    values: dict[str, str] = {
        "question": answers.questions[case.problem_id],
        "reference": answers.references[case.problem_id],
        "criterion": rubric.criteria[case.criterion][0] if rubric.criteria else "",
        "answer": texts[0],
        "answer_a": texts[0],
        "answer_b": texts[-1],
    }
    body = rubric.templates[case.wording].render(values)
    return rubric.system, body + rubric.ending(reasons=judging.settings.verdicts == "samples")


def build_content(
    turns: tuple[str, str], *, chat: bool, reply_prefix: str
) -> str | list[Mapping[str, Any]]:
    """Return a prompt as the content of a node: a text, or messages with a chat template.

    Args:
        turns: The system turn and the user turn; the system turn may be empty.
        chat: Whether to return messages.
        reply_prefix: Text with which the reply begins; used only without chat.
    """
    system, user = turns
    if not chat:
        return f"{system}\n\n{user}{reply_prefix}" if system else f"{user}{reply_prefix}"
    before = [{"role": "system", "content": system}] if system else []
    return [*before, {"role": "user", "content": user}]
