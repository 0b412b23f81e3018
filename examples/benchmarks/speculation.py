"""The speedup of speculation, when a model of any shape draws recorded samples again.

Random weights do not repeat text, so nothing could be predicted. So the rows are forced to the
tokens of samples that a real model drew, through the mechanism of thinking budgets. Drafts and
their acceptance are then those of the real samples, and the time is that of the shape.

recorded.json has samples of SmolLM2-135M-Instruct. Its figures in docs/benchmarks/features.md come
from

    python examples/benchmarks/speculation.py --rows 16,64,1024 --prefix 1000 --repeats 1

and others from the same with `--trace FILE` or `--own-tokens 16384`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
import numpy as np

from treegen.bench.shapes import load_or_build
from treegen.bench.timing import Spread, describe_machine, headline
from treegen.cli.bench.options import RUNS, int_list_option, int_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line, print_table
from treegen.common.files import describe_read_error, read_bytes
from treegen.common.params import SamplingParams
from treegen.engine.features.budgets import ThinkingBudgets
from treegen.engine.rows.token_store import grow_arrays
from treegen.errors import InputError
from treegen.llm import LLM
from treegen.prompts.tree import MAX_TOKEN_ID, Node
from treegen.report.tables import PrintableTable

if TYPE_CHECKING:
    from treegen.common.outputs import Usage
    from treegen.engine.compute.levels import Ints
    from treegen.engine.segments.segment import LiveRequest

RECORDED: Final = Path(__file__).parent / "recorded.json"
_Samples = dict[str, Sequence[Sequence[int]]]
_STEP: Final = 7919  # shift of token ids between copies of a problem, so that they share none


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded samples.

    source: where they come from.
    prompts: the tokens of each problem. samples: the tokens of each of its samples.
    """

    source: str
    prompts: Sequence[Sequence[int]]
    samples: Sequence[Sequence[Sequence[int]]]

    @staticmethod
    def read(path: Path = RECORDED) -> Trace:
        """Return the samples of a file: {"source": ..., "prompts": [[id]], "samples": [[[id]]]}.

        Raises:
            InputError: the file cannot be read, or does not have this form.
        """
        try:
            document = json.loads(read_bytes(path))
        except OSError as error:
            raise InputError(describe_read_error(path, error)) from error
        except (ValueError, RecursionError):
            document = None
        if not _is_trace(document):
            raise InputError(
                f'{path} contains no recorded samples; pass JSON of the form {{"source": TEXT, '
                '"prompts": [[ID, ...], ...], "samples": [[[ID, ID, ...], ...], ...]}, with at '
                "least two tokens per sample"
            )
        return Trace(str(document["source"]), document["prompts"], document["samples"])


def _is_trace(document: Any) -> bool:
    """Whether JSON has the fields of a trace, with at least one token to decode."""
    fields = {"source", "prompts", "samples"}
    if not isinstance(document, dict) or not fields <= document.keys():
        return False
    prompts, samples = document["prompts"], document["samples"]
    if not (isinstance(prompts, list) and isinstance(samples, list)):
        return False
    if not prompts or len(prompts) != len(samples):
        return False
    # The first token of a sample is drawn by a prefill pass, which is not measured.
    return all(_are_ids(prompt) for prompt in prompts) and all(
        isinstance(of_prompt, list)
        and of_prompt
        and all(_are_ids(tokens, min_length=2) for tokens in of_prompt)
        for of_prompt in samples
    )


def _are_ids(tokens: Any, min_length: int = 0) -> bool:
    return (
        isinstance(tokens, list)
        and len(tokens) >= min_length
        and all(type(token) is int and 0 <= token <= MAX_TOKEN_ID for token in tokens)
    )


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """A job.

    rows: samples decoded at once.
    samples: samples in total; they take the places of those that end.
    prefix: tokens that all prompts share.
    own_tokens: further prompt tokens of each single sample.
    """

    rows: int
    samples: int
    prefix: int
    own_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpeculationGain:
    """The speed of a job without speculation and with it.

    plain, guessed: tokens of decode steps per second, without and with speculation.
    ratio: the second over the first, pair by pair.
    tokens_per_step: tokens of a row per pass. drafted, accepted: numbers of draft tokens.
    steps: decode steps without speculation, and with it.
    """

    job: SpeculationLoad
    plain: Spread
    guessed: Spread
    ratio: Spread
    tokens_per_step: float
    drafted: int
    accepted: int
    steps: tuple[int, int]


def gain_table(gains: Sequence[SpeculationGain]) -> PrintableTable:
    """Return a table with a row for each job."""
    return PrintableTable.of(
        gains,
        {
            "Rows": "{0.job.rows:,}",
            "Samples": "{0.job.samples:,}",
            "Prefix": "{0.job.prefix:,}",
            "Own": "{0.job.own_tokens:,}",
            "tok/s": "{0.plain.median:,.0f}",
            "guessing": "{0.guessed.median:,.0f}",
            "ratio": "{0.ratio.median:.2f}",
            "tokens a pass": "{0.tokens_per_step:.2f}",
            "drawn of guessed": lambda gain: f"{gain.accepted / max(gain.drafted, 1):.0%}",
        },
    )


class _RecordedTokens(ThinkingBudgets):
    """Forces each row to the tokens of a recorded sample, except the first, which is drawn."""

    samples: _Samples

    def begin(self, requests: Sequence[LiveRequest], slots_PN: Ints) -> None:
        """Record the tokens of new rows, which also determine their lengths."""
        self.used = True
        rows = self._run.rows
        grow_arrays(self, len(rows.phase), -1)
        for request, slots in zip(requests, slots_PN, strict=True):
            for slot in slots.tolist():
                tokens = self.samples[request.spec.id][int(rows.sample[slot])]
                self._force(np.array([slot]), tokens[1:], 1)
                rows.limit[slot] = max(len(tokens), 1)


def measure(
    llm: LLM, trace: Trace, jobs: Sequence[SpeculationLoad], repeats: int, *, warm_ups: int = 2
) -> Iterator[SpeculationGain]:
    """Run each job without speculation and with it, in turn.

    Args:
        llm: The engine.
        trace: The recorded samples.
        jobs: The jobs to run.
        repeats: Timed pairs of runs of each job.
        warm_ups: Untimed pairs of runs. Some batch sizes are captured only when they occur
            again. Default: 2.

    Raises:
        CapacityError: a job does not fit.
    """
    for job in jobs:
        llm.engine.max_rows = job.rows
        tree, samples = _tree(trace, job, llm.spec.vocab_size)
        run = partial(_run, llm, tree, samples)
        pairs: list[tuple[Usage, Usage]] = []
        with _keep_prompts(llm, tree) if job.own_tokens else nullcontext():
            for turn in range(warm_ups + repeats):
                settings = ("off", "ngram") if turn % 2 else ("ngram", "off")
                usages = {setting: run(setting) for setting in settings}
                if turn >= warm_ups:
                    pairs.append((usages["off"], usages["ngram"]))
        speeds = [[_speed(usage, job.samples) for usage in pair] for pair in pairs]
        off, on = pairs[-1]
        yield SpeculationGain(
            job,
            plain=Spread.of([plain for plain, _ in speeds]),
            guessed=Spread.of([guessed for _, guessed in speeds]),
            ratio=Spread.of([guessed / plain for plain, guessed in speeds]),
            tokens_per_step=on.tokens_per_step,
            drafted=on.drafted_tokens,
            accepted=on.accepted_tokens,
            steps=(off.decode_steps, on.decode_steps),
        )


@contextmanager
def _keep_prompts(llm: LLM, tree: Node) -> Iterator[None]:
    """Cache the prompts of single rows, so that no prefill pass falls among the decode steps."""
    cache = llm.engine.prefix_cache
    max_pages, cache.max_pages = cache.max_pages, llm.cache.pool.num_pages
    try:
        with llm.keep(tree):
            yield
    finally:
        cache.max_pages = max_pages


def _speed(usage: Usage, samples: int) -> float:
    return (usage.decoded_tokens - samples) / usage.decode_seconds


def _run(llm: LLM, tree: Node, samples: _Samples, speculate: str) -> Usage:
    llm.engine.drafters.speculate = speculate
    longest = max(len(tokens) for of_prompt in samples.values() for tokens in of_prompt)
    params = SamplingParams(max_tokens=longest, ignore_eos=True)
    with llm.stream(tree, params) as stream:
        scheduler = stream.scheduler
        scheduler.features.budgets = forced = _RecordedTokens(
            scheduler.run, scheduler.features.grammars
        )
        scheduler.queue.features = scheduler.features.row_features
        forced.samples = samples
        for _ in stream:
            pass
        return stream.usage


def _tree(trace: Trace, job: SpeculationLoad, vocab_size: int) -> tuple[Node, _Samples]:
    """Return the prompts of a job, and the samples of each by its id."""
    rng = np.random.default_rng(0)
    leaves: list[Node] = []
    recorded: _Samples = {}
    remaining, number = job.samples, 0
    while remaining:
        copy, problem = divmod(number, len(trace.prompts))

        def shift_tokens(tokens: Sequence[int], shift: int = copy * _STEP) -> list[int]:
            return [(token + shift) % vocab_size for token in tokens]

        samples = [shift_tokens(tokens) for tokens in trace.samples[problem][:remaining]]
        text = shift_tokens(trace.prompts[problem])
        remaining, number = remaining - len(samples), number + 1
        # With own tokens each sample has its own prompt.
        parts = [[sample] for sample in samples] if job.own_tokens else [samples]
        for index, part in enumerate(parts):
            name, before = f"{number}/{index}", rng.integers(2, vocab_size, job.own_tokens)
            leaves.append(Node([*before.tolist(), *text], samples=len(part), id=name))
            recorded[name] = part
    return Node(
        rng.integers(2, vocab_size, job.prefix).tolist(), children=leaves, samples=0
    ), recorded


@script
@click.option("--shape", metavar="NAME", help="Random weights of this shape. Default: llama3-8b.")
@int_list_option("--rows", "Samples decoded at once.", default="16,64,1024")
@int_list_option("--prefix", "Prompt tokens that all share.", default="1000")
@int_option("--own-tokens", 0, "Prompt tokens that each sample has for itself.", minimum=0)
@click.option(
    "--trace",
    metavar="FILE",
    help="Other recorded samples, as JSON {source, prompts, samples} of token ids.",
)
@add_options(*RUNS)
def main(
    shape: str | None,
    rows: list[int],
    prefix: list[int],
    own_tokens: int,
    trace: str | None,
    **options: Any,
) -> None:
    """Guessed tokens against none, where rows are given the tokens of recorded samples."""
    recorded = Trace.read(Path(trace) if trace else RECORDED)

    def job(number: int, length: int) -> SpeculationLoad:
        # More prompts with own tokens would not fit in memory with those of the first rows.
        more = number if own_tokens or number >= 1024 else max(4 * number, 64)
        return SpeculationLoad(number, more, length, own_tokens)

    jobs = [job(number, length) for length in prefix for number in rows]
    shape = shape_or_model(shape, options["model"], "llama3-8b")
    how = {name: options[name] for name in ("dtype", "device", "ranks", "quantization")}
    model, tokenizer = load_or_build(shape, options["model"], **how)
    settings = {name: options[name] for name in ("memory", "eager", "reproducible")}
    llm = LLM(model, tokenizer=tokenizer, **settings)
    machine = describe_machine(model.device)
    echo(f"{headline(machine)}, {model.spec.name}\nrecorded samples: {recorded.source}\n")
    gains = list(measure(llm, recorded, jobs, options["repeats"]))
    model.close()
    print_table(gain_table(gains))
    json_line(
        {
            "bench": "speculate",
            "machine": machine,
            "model": model.spec.name,
            "trace": recorded.source,
            "settings": settings,
            "results": gains,
        }
    )


if __name__ == "__main__":
    main()
