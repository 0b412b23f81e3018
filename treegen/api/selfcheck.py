"""Tests on a model and a device whether samples depend on the other rows of a batch.

One job runs in its normal form and then in other arrangements: in another order, in parts, with
fewer rows or pages, resumed. Samples of the same problem and index are compared: their tokens and,
bit by bit, their log-probabilities.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from treegen.common.outputs import Usage
from treegen.common.params import SamplingParams
from treegen.evals.model import check_machine, load_model_info
from treegen.llm import LLM
from treegen.model.options import EngineOptions
from treegen.prompts.tree import Node
from treegen.report.tables import PrintableTable

_ROWS: Final = 16  # rows in the arrangement with few rows
_SAMPLES: Final = 8

_Problems = dict[str, str]
_Samples = dict[tuple[str, int], tuple[tuple[int, ...], float]]


@dataclass(frozen=True, slots=True)
class Arrangement:
    """One way to run a part of the job, compared with the normal run of the whole job."""

    name: str
    """What is different, for display."""
    samples: int
    """Samples that it draws."""
    same: int
    """Samples with the same tokens."""
    to_the_bit: int
    """Samples that also have the same log-probability."""
    preemptions: int
    """Number of rows that were preempted and recomputed."""


@dataclass(frozen=True, slots=True)
class SelfCheckResult:
    """The results of all arrangements of a job."""

    promised: bool
    """Whether samples are promised to be the same."""
    document: dict[str, Any]
    """All results, as JSON."""
    table: PrintableTable

    @property
    def is_broken(self) -> bool:
        """Whether samples differ although they are promised to be the same."""
        return self.promised and self.document["same"] < self.document["samples"]


def self_check(options: EngineOptions, problems: int) -> SelfCheckResult:
    """Run a job of `problems` problems in all arrangements. Raises what `LLM` raises."""
    check_machine(options)
    model_info = load_model_info(options)
    check = SelfCheck(options, problems=problems)
    arrangements = list(check.arrangements())
    promised = options.reproducible or (model_info.device_type, model_info.dtype) == (
        "cpu",
        "float32",
    )
    document = {
        "model": options.model,
        "device": model_info.device_type,
        "dtype": model_info.dtype,
        "impl": check.usage.impl,
        "reproducible": options.reproducible,
        "promised": promised,
        **{
            name: sum(getattr(arrangement, name) for arrangement in arrangements)
            for name in ("samples", "same")
        },
        "arrangements": [asdict(arrangement) for arrangement in arrangements],
    }
    return SelfCheckResult(promised, document, arrangement_table(arrangements))


def arrangement_table(arrangements: Iterable[Arrangement]) -> PrintableTable:
    """Return a table with a row for each arrangement."""
    columns = {
        "Arrangement": "{0.name}",
        "Samples": "{0.samples:,}",
        "Same": "{0.same:,}",
        "To the bit": "{0.to_the_bit:,}",
        "Preempted": "{0.preemptions:,}",
    }
    return PrintableTable.of(arrangements, columns, words=["Arrangement"])


class SelfCheck:
    """A job of a few problems, and its arrangements on one model."""

    def __init__(self, options: EngineOptions, *, problems: int = 24, max_tokens: int = 64) -> None:
        """Load the model and run the whole job. Raises what `LLM` and its runs raise.

        Args:
            options: The model, and how its engine is made.
            problems: Number of problems. Default: 24.
            max_tokens: Maximum tokens per sample. Default: 64.
        """
        self._llm = LLM(**asdict(options))
        self._options = options.engine()
        self._params = SamplingParams(max_tokens=max_tokens, seed=7)
        self._problems = _problems(problems)
        self._reference, self.usage = self._run(self._problems)

    def arrangements(self) -> Iterator[Arrangement]:
        """Run the job in one arrangement after another."""
        problems = self._problems
        names = list(problems)
        shuffled = random.Random(3).sample(names, len(names))
        yield self._compare("again", problems)
        yield self._compare("in another order", {name: problems[name] for name in shuffled})
        yield self._compare("every second problem", {name: problems[name] for name in names[::2]})
        for name in (names[0], names[len(names) // 2], names[-1]):
            yield self._compare(f"{name} alone", {name: problems[name]})
        evens, later = range(0, _SAMPLES, 2), range(1, _SAMPLES)
        yield self._compare("every second sample, as resumed runs draw", problems, skip=evens)
        yield self._compare("one sample of each", problems, skip=later)
        few_pages = {"memory": self._min_memory(), "page_size": 16}
        changes: dict[str, dict[str, Any]] = {
            f"{_ROWS} rows at once": {"max_rows": _ROWS},
            "few pages": few_pages,
            "prompts computed in small parts": {"prefill_chunk": 96},
            "no sharing": {"sharing": "off"},
            "all levels shared": {"sharing": "all"},
            "steps not launched ahead": {"run_ahead": False},
        }
        for name, changed in changes.items():
            model, tokenizer = self._llm.model, self._llm.tokenizer
            del self._llm  # frees its pages
            self._llm = LLM(model, tokenizer=tokenizer, **{**self._options, **changed})
            yield self._compare(name, problems)

    def _compare(self, name: str, problems: _Problems, skip: Sequence[int] = ()) -> Arrangement:
        samples, usage = self._run(problems, skip)
        pairs = [(sample, self._reference[key]) for key, sample in samples.items()]
        return Arrangement(
            name=name,
            samples=len(pairs),
            same=sum(sample[0] == reference[0] for sample, reference in pairs),
            to_the_bit=sum(sample == reference for sample, reference in pairs),
            preemptions=usage.preemptions,
        )

    def _run(self, problems: _Problems, skip: Sequence[int] = ()) -> tuple[_Samples, Usage]:
        """Return samples of problems.

        Args:
            problems: The problems to sample.
            skip: Indices of the samples to leave out. Default: none.
        """
        done = [(name, index) for name in problems for index in skip]
        with self._llm.stream(_tree(problems), self._params, skip=done) as stream:
            samples = {(c.prompt_id, c.sample_index): (c.tokens, c.logprob) for c in stream}
            return samples, stream.usage

    def _min_memory(self) -> int:
        """Return the bytes for the prompts and for a few rows."""
        plan = self._llm.plan(_tree(self._problems), self._params)
        page = 16  # the last page of each segment or row may not be full
        rows = _ROWS // 2 * (self._params.max_tokens // 2 + page)
        tokens = plan.stored_tokens + page * (len(plan.segments) + 2) + rows
        size, state = tokens * self._llm.spec.kv_bytes_per_token, self._llm.spec.state_bytes
        # Recurrent states get a quarter of the memory or more; see `cache_size`.
        return 2 * size + 4 * _ROWS * state if state else size


def _problems(num: int) -> _Problems:
    """Return problems by name, whose texts begin alike and have many lengths."""
    rng = random.Random(1)
    words = [
        "one",
        "three",
        "seven",
        "eleven",
        "apples",
        "pears",
        "boxes",
        "gives",
        "sells",
        "buys",
    ]
    return {
        f"problem {index + 1}": f"Q: Tom has {rng.randrange(2, 50)} {rng.choice(words)} and gets "
        f"{rng.randrange(2, 500)} more{' and more' * rng.randrange(4)}. How many does he have?\nA:"
        for index in range(num)
    }


def _tree(problems: _Problems) -> Node:
    shots = [
        f"Q: Ann has {i} apples and buys {i + 3}. How many apples?\n"
        f"A: {i} + {i + 3} = {2 * i + 3}. The answer is {2 * i + 3}.\n\n"
        for i in range(8)
    ]
    leaves = [Node(text, samples=_SAMPLES, id=name) for name, text in problems.items()]
    return Node("".join(shots), children=leaves)
