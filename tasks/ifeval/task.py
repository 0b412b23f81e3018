r"""IFEval: prompts with instructions that a program can check, such as "use no commas".

Data: https://github.com/google-research/google-research/tree/master/instruction_following_eval
(data/input_data.jsonl), or google/IFEval on the Hugging Face hub. One row:

    {"key": 1000, "prompt": "Write about rain. Use no commas and at least 30 words.",
     "instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],
     "kwargs": [{}, {"relation": "at least", "num_words": 30}]}

The prompt is used unchanged. Checks and scores are those of the published code
(https://arxiv.org/abs/2311.07911) and of lm-eval's `ifeval`: whether all instructions of a prompt
are followed, and the share of all instructions that are followed. `strict` checks the unchanged
answer, `loose` also the answer without its first or last line and without stars.
"""

import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, Final

from treegen.errors import InputError, install
from treegen.evals.arguments import one_of
from treegen.evals.problem import Problem
from treegen.evals.statistics.metrics import MetricRow, Report, ReportOptions, clusters_of, mean_row
from treegen.evals.statistics.tables import table_by
from treegen.evals.task import TaskData, TaskOptions
from treegen.evals.verdict import SampleScore, Verdict
from treegen.tasks.common.files import text_field
from treegen.tasks.common.sources import HubTable, Source
from treegen.tasks.common.text_task import Loaded, TextTask, greedy
from treegen.tasks.ifeval import checks
from treegen.tasks.ifeval.checks import Check

Make = Callable[[Mapping[str, Any]], Check]

_KINDS: Final[Mapping[str, Make]] = {
    "keywords:existence": checks.existence,
    "keywords:frequency": checks.frequency,
    "keywords:forbidden_words": checks.forbidden_words,
    "keywords:letter_frequency": checks.letter_frequency,
    "language:response_language": checks.response_language,
    "length_constraints:number_paragraphs": checks.number_paragraphs,
    "length_constraints:number_words": checks.number_words,
    "length_constraints:nth_paragraph_first_word": checks.nth_paragraph_first_word,
    "detectable_content:number_placeholders": checks.number_placeholders,
    "detectable_content:postscript": checks.postscript,
    "detectable_format:number_bullet_lists": checks.number_bullet_lists,
    "detectable_format:constrained_response": checks.constrained_response,
    "detectable_format:number_highlighted_sections": checks.number_highlighted_sections,
    "detectable_format:multiple_sections": checks.multiple_sections,
    "detectable_format:json_format": checks.json_format,
    "detectable_format:title": checks.title,
    "combination:two_responses": checks.two_responses,
    "combination:repeat_prompt": checks.repeat_prompt,
    "startend:end_checker": checks.end_checker,
    "startend:quotation": checks.quotation,
    "change_case:english_capital": checks.english_capital,
    "change_case:english_lowercase": checks.english_lowercase,
    "punctuation:no_comma": checks.no_comma,
}
_BY_SENTENCES: Final[Mapping[str, Callable[[Mapping[str, Any], str], Check]]] = {
    "length_constraints:number_sentences": checks.number_sentences,
    "change_case:capital_word_frequency": checks.capital_word_frequency,
}
KINDS: Final = frozenset(_KINDS) | frozenset(_BY_SENTENCES)
NEED_SENTENCES: Final = frozenset(_BY_SENTENCES)
NEED_LANGUAGE: Final = frozenset(
    ("language:response_language", "change_case:english_capital", "change_case:english_lowercase")
)


def make_check(kind: str, arguments: Mapping[str, Any], way: str) -> Check:
    """Return the check of an instruction.

    Args:
        kind: Name of the instruction, one of KINDS.
        arguments: Its arguments; those that are None are ignored.
        way: How sentences are split, "punkt" or "rule".

    Raises:
        ValueError: There is no such kind, or an argument is missing or invalid.
    """
    present = {name: value for name, value in arguments.items() if value is not None}
    if kind in _BY_SENTENCES:
        return partial(_passes_if_not_blank, _BY_SENTENCES[kind](present, way))
    if kind not in _KINDS:
        raise ValueError(f"there is no instruction {kind!r:.60}")
    return partial(_passes_if_not_blank, _KINDS[kind](present))


def _passes_if_not_blank(check: Check, answer: str) -> bool:
    """Return whether an answer is not blank and passes a check."""
    return bool(answer.strip()) and check(answer)


def variants(answer: str) -> Sequence[str]:
    """Return the forms of an answer that the loose rule tries, without repeats.

    They are the answer without its first line, its last line or both, and each of these without
    stars, because models often add such text.
    """
    lines = answer.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    plain = [answer, *cut]
    return list(dict.fromkeys([*plain, *(form.replace("*", "") for form in plain)]))


@dataclass(frozen=True, slots=True)
class FollowedVerdict(Verdict):
    """A verdict on an answer to a prompt with several instructions.

    correct: whether all instructions are followed. credit: the share of followed instructions.
    """

    followed: tuple[bool, ...] = ()
    """Whether each instruction is followed."""


def _shares(scores: Sequence[SampleScore], filter: str) -> dict[str, list[float]]:
    """Return, for each problem, the share of samples that follow each of its instructions."""
    shares: dict[str, list[tuple[bool, ...]]] = {}
    for sample in scores:
        verdict = sample.verdicts[filter]
        assert isinstance(verdict, FollowedVerdict)
        shares.setdefault(sample.problem_id, []).append(verdict.followed)
    return {
        id: [sum(column) / len(flags) for column in zip(*flags, strict=True)]
        for id, flags in shares.items()
    }


def _over_instructions(
    shares: Mapping[str, Sequence[float]], clusters: Mapping[str, Hashable]
) -> dict[str, Any]:
    """Return the mean over instructions.

    The outcomes of one prompt's instructions are correlated. So the error bar is clustered by
    prompts, or by the groups of prompts.
    """
    values = [value for values_of_problem in shares.values() for value in values_of_problem]
    names = [
        clusters.get(id, ("", id))
        for id, values_of_problem in shares.items()
        for _ in values_of_problem
    ]
    return {"stderr": None, "low": None, "high": None, **mean_row(values, clusters=names)}


# Characters; no real answer is as long. Longer texts fail every check, which bounds their cost.
_MAX_RESPONSE_CHARS: Final = 1_000_000


class IFEval(TextTask):
    """Instructions that can be checked, over prompts and over instructions."""

    name = "ifeval"
    noun = "prompt"
    filters = ("strict", "loose")
    arguments: ClassVar = {
        "sentences": "how to split sentences: punkt (default; nltk's, as published, needs its "
        "data) or rule (treegen's own rule)",
    }
    source = Source(
        task="ifeval",
        bundled="ifeval_sample.jsonl",
        hub=HubTable("google/IFEval", ("train",)),
        files={"train": ("input_data.jsonl",)},
    )
    defaults: Final = greedy(max_tokens=1280)

    def __init__(self) -> None:
        """Split sentences as published until `load` sets another way."""
        self._way = checks.PUNKT
        self._checks = lru_cache(maxsize=4096)(self._make_checks)

    def load(self, options: TaskOptions) -> TaskData:
        """Read the prompts and their instructions.

        Raises:
            InputError: An option is invalid, or a package that some instructions need is not
                installed.
            DataError: The data cannot be read, or have no usable prompt.
        """
        data = super().load(options)
        self._check_needs(data.problems)
        by_rule = "sentences by rule" if self._way == checks.RULE else ""
        return replace(data, label=", ".join(filter(None, [data.label, by_rule])))

    def read(self, options: TaskOptions) -> Loaded:
        """Return all prompts of the data."""
        ways = (checks.PUNKT, checks.RULE)
        self._way = one_of(options.extra, "sentences", ways, checks.PUNKT)
        self._checks.cache_clear()
        return super().read(options)

    def score(self, problem: Problem, text: str) -> dict[str, Verdict]:
        """Return which instructions an answer follows, by the strict and by the loose rule."""
        checks = self._checks(problem.answer)
        if len(text) > _MAX_RESPONSE_CHARS or not text.strip():
            nothing = FollowedVerdict(None, False, 0.0, followed=(False,) * len(checks))
            return dict.fromkeys(self.filters, nothing)
        strict = [check(text) for check in checks]
        forms = variants(text)
        loose = [
            is_strict or any(map(check, forms))
            for check, is_strict in zip(checks, strict, strict=True)
        ]
        return {"strict": _verdict(strict), "loose": _verdict(loose)}

    def aggregate(self, scores: Sequence[SampleScore], options: ReportOptions) -> Report:
        """Return the accuracy over prompts and over instructions, also by kind."""
        overall = self.overall(scores, options)
        rows: list[MetricRow] = []
        ids = list(options.problem_ids)
        clusters = dict(zip(ids, clusters_of(options.problems, ids) or (), strict=False))
        for row in overall.metrics:
            if row.metric != "exact_match":
                rows.append(row)
                continue
            rows.append(replace(row, metric="prompt_level_acc"))
            fields = _over_instructions(_shares(scores, row.filter), clusters)
            rows.append(replace(row, metric="inst_level_acc", **fields))
        kinds: dict[str, list[str]] = {}
        for problem in options.problems:
            for index, kind in enumerate(problem.metadata.get("instructions", ())):
                kinds.setdefault(kind, []).append(f"{problem.id}/{index}")
        first = overall.metrics[0].filter
        values = {
            f"{id}/{index}": value
            for id, shares in _shares(scores, first).items()
            for index, value in enumerate(shares)
        }
        table = table_by(
            f"{first} accuracy by instruction", "Instruction", sorted(kinds.items()), values
        )
        tables = (*overall.tables, table) if kinds else overall.tables
        return replace(overall, metrics=tuple(rows), majority=(), tables=tables)

    def make_problem(self, row: dict[str, Any], line: int) -> Problem:
        """Return the prompt of a row and its instructions, which are checked here."""
        kinds, arguments = row.get("instruction_id_list"), row.get("kwargs")
        if not isinstance(kinds, list) or not kinds:
            raise ValueError("instruction_id_list must be a list of instructions")
        if not isinstance(arguments, list) or len(arguments) != len(kinds):
            raise ValueError("kwargs must have one object for each instruction")
        if not all(isinstance(mapping, Mapping) for mapping in arguments):
            raise ValueError("kwargs must be a list of objects")
        present = [{n: v for n, v in mapping.items() if v is not None} for mapping in arguments]
        for kind, mapping in zip(kinds, present, strict=True):
            try:
                make_check(kind, mapping, self._way)
            except ValueError as error:
                raise ValueError(f"{kind}: {error}") from None
        answer = json.dumps([kinds, present])
        prompt = text_field(row, "prompt")
        key = row.get("key")
        id = f"{self.name}-{line - 1}" if key is None else str(key)
        return Problem(id, prompt, answer, {"instructions": kinds, "line": line})

    def _make_checks(self, answer: str) -> list[Check]:
        kinds, arguments = json.loads(answer)
        return [
            make_check(kind, mapping, self._way)
            for kind, mapping in zip(kinds, arguments, strict=True)
        ]

    def _check_needs(self, problems: Sequence[Problem]) -> None:
        """Raise InputError for checks that need missing packages, before a model is loaded."""
        used = {kind for problem in problems for kind in problem.metadata["instructions"]}
        if (kinds := used & NEED_LANGUAGE) and not checks.is_langdetect_installed():
            raise InputError(
                f"ifeval needs the package langdetect to check {', '.join(sorted(kinds))}; "
                f"install it with: {install('ifeval')}"
            )
        if (kinds := used & NEED_SENTENCES) and self._way == checks.PUNKT:
            lacking = checks.missing_for_punkt()
            if lacking is not None:
                raise InputError(
                    f"ifeval needs the nltk data punkt_tab to check {', '.join(sorted(kinds))}; "
                    f"install the data with {lacking}, or pass -T sentences=rule, whose "
                    "scores are not comparable with published scores"
                )


def _verdict(followed: Sequence[bool]) -> FollowedVerdict:
    flags = "".join("1" if follows else "0" for follows in followed)
    return FollowedVerdict(
        flags, all(followed), sum(followed) / len(followed), followed=tuple(followed)
    )
