"""Jobs modelled on the experiments of the Hydragen paper and of Large Language Monkeys.

They follow Juravsky et al. 2024 (arXiv:2402.05099) and Brown et al. 2024 (arXiv:2407.21787), but
are not copies: tokens are synthetic. Each experiment states the choices made here, so that its
numbers are compared with published ones only where the work is the same. The engine without sharing
is treegen with sharing off; its batch is bounded by what it would store without sharing.

The figures of docs/benchmarks/paper.md come from

    python examples/benchmarks/paper.py gsm8k --scale 0.2 --repeats 1
    python examples/benchmarks/paper.py apps --scale 0.058 --repeats 1
    python examples/benchmarks/paper.py apps --scale 0.058 --length-scale 0.5 --repeats 1
    python examples/benchmarks/paper.py tables --repeats 1 --time-limit 20
    python examples/benchmarks/paper.py mmlu --repeats 1
    python examples/benchmarks/paper.py needle --scale 1 --repeats 1

and those of docs/performance.md from

    python examples/benchmarks/paper.py monkeys --scale 0.25 --repeats 1
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import click
from transformers_baseline import ENGINES, TransformersBench, check_engines

from treegen.bench.workloads import NO_ATTENTION, Case, Workload
from treegen.cli.bench.decode import run_cases
from treegen.cli.bench.options import RUNS, bounded_option, name_list_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import echo, json_line
from treegen.errors import InputError


@dataclass(frozen=True, slots=True)
class Experiment:
    """Workloads to run and compare.

    what: the experiment in a few words.
    chosen: choices that the paper leaves open; printed with every result.
    shape: the default model shape.
    modes: the modes to compare.
    """

    name: str
    what: str
    chosen: str
    shape: str
    workloads: tuple[Workload, ...]
    modes: tuple[str, ...]

    def heading(self, scale: float) -> str:
        """Return the lines above its results. scale: the share of the problems to run."""
        return (
            f"{self.name}: {self.what}; {scale:g} of the problems, synthetic tokens\n"
            f"chosen here, not by the source: {self.chosen}\n"
        )


def _both_batches(workload: Workload) -> tuple[Workload, ...]:
    """Return the workload at equal batch, and at the largest that memory admits in each mode."""
    return (
        replace(workload, name=f"{workload.name}, equal batch", equal=True),
        replace(workload, name=f"{workload.name}, largest batch"),
    )


EXPERIMENTS: Final = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "tables",
            "CodeLlama-7B, 128 tokens, by prefix and rows",
            "which prefixes and rows",
            "codellama-7b",
            tuple(
                Workload("tables", prefix=prefix, new_tokens=128, samples=rows, max_rows=rows)
                for prefix in (1024, 2048, 4096, 8192, 16_384)
                for rows in (64, 256, 1024)
            ),
            ("all", "off", NO_ATTENTION),
        ),
        Experiment(
            "needle",
            "64 to 1,024 questions on a document of 19,900 tokens",
            "the shape, 20 tokens a question, which numbers of questions",
            "yi-6b",
            tuple(
                Workload(
                    "needle",
                    prefix=19_900,
                    problems=questions,
                    problem_tokens=20,
                    samples=1,
                    new_tokens=10,
                    max_rows=questions,
                )
                for questions in (64, 128, 256, 512, 1024)
            ),
            ("all", "off", NO_ATTENTION),
        ),
        Experiment(
            "apps",
            "120 problems x 128 samples x 512 tokens, two-shot: two levels against one",
            "the shape, 500 tokens a problem",
            "codellama-7b",
            _both_batches(
                Workload(
                    "apps",
                    prefix=2400,
                    problems=120,
                    problem_tokens=500,
                    samples=128,
                    new_tokens=512,
                )
            ),
            ("all", "one"),
        ),
        Experiment(
            "gsm8k",
            "8-shot, 40 samples for self-consistency",
            "the shape, 128 problems, 900 tokens of examples, 100 a problem, 200 a sample",
            "codellama-7b",
            _both_batches(
                Workload(
                    "gsm8k",
                    prefix=900,
                    problems=128,
                    problem_tokens=100,
                    samples=40,
                    new_tokens=200,
                )
            ),
            ("all", "one", "off"),
        ),
        Experiment(
            "mmlu",
            "5-shot by subject, one answer token",
            "the shape, 700 tokens of examples, 246 questions of 100 tokens a subject",
            "codellama-7b",
            (
                Workload(
                    "mmlu",
                    prefixes=57,
                    prefix=700,
                    problems=246,
                    problem_tokens=100,
                    samples=1,
                    new_tokens=1,
                    equal=True,
                ),
            ),
            ("all", "off"),
        ),
        Experiment(
            "monkeys",
            "GSM8K, 128 problems x 1,024 samples, Llama-3.2-1B",
            "900 tokens of examples, 100 a problem, 128 a sample, 4,096 rows",
            "llama3.2-1b",
            (
                Workload(
                    "monkeys",
                    prefix=900,
                    problems=128,
                    problem_tokens=100,
                    samples=1024,
                    new_tokens=128,
                    max_rows=4096,
                ),
            ),
            ("all", "one", "off", NO_ATTENTION),
        ),
    )
}
PAPER: Final = tuple(name for name in EXPERIMENTS if name != "monkeys")


def get_experiment(name: str) -> Experiment:
    """Return the experiment with a name.

    Raises:
        InputError: no experiment has the name.
    """
    if name not in EXPERIMENTS:
        raise InputError(f"experiment must be one of {', '.join(EXPERIMENTS)}, got {name!r}")
    return EXPERIMENTS[name]


def cases_of(
    experiment: Experiment, *, scale: float, lengths: float, against: Sequence[str] = ()
) -> list[Case]:
    """Return the cases of an experiment, without those that scaling makes equal.

    Args:
        experiment: The experiment.
        scale: The share of the problems to run.
        lengths: Factor for all lengths.
        against: Further modes, such as transformers' own engines.
    """
    modes = (*experiment.modes, *against)
    scaled = dict.fromkeys(job.scale(scale, lengths) for job in experiment.workloads)
    return [Case(workload, modes) for workload in scaled]


def _is_share(value: float) -> bool:
    return 0 < value <= 1


@script
@click.argument("names", nargs=-1, metavar="[EXPERIMENT]...")
@click.option(
    "--shape",
    metavar="NAME",
    help="Random weights of this shape; default: by experiment, see the output.",
)
@bounded_option(
    "--scale",
    _is_share,
    "above 0 and at most 1",
    default=0.1,
    show_default=True,
    help="Share of the problems to run.",
)
@bounded_option(
    "--length-scale",
    _is_share,
    "above 0 and at most 1",
    default=1.0,
    show_default=True,
    help="Multiply all lengths, to try a command out.",
)
@name_list_option(
    "--against",
    ENGINES,
    "Engines of transformers to time as well: generate, continuous.",
    default="",
)
@add_options(*RUNS)
def main(
    names: tuple[str, ...],
    shape: str | None,
    scale: float,
    length_scale: float,
    against: tuple[str, ...],
    **options: Any,
) -> None:
    """Jobs after published experiments: tables, needle, apps, gsm8k, mmlu, monkeys.

    Default: all but monkeys, which is a job like GSM8K with 1,024 samples for each of 128 problems.
    """
    documents = []
    for experiment in [get_experiment(name) for name in names or PAPER]:
        cases = cases_of(experiment, scale=scale, lengths=length_scale, against=against)
        chosen = shape_or_model(shape, options["model"], experiment.shape)
        check_engines(cases, options["ranks"])
        _, document = run_cases(
            cases, chosen, options, title=experiment.heading(scale), bench_type=TransformersBench
        )
        about = {"experiment": experiment.name, "scale": scale, "length_scale": length_scale}
        documents.append({**about, "chosen_here": experiment.chosen, **document})
        echo("")
    json_line({"bench": "paper", "experiments": documents})


if __name__ == "__main__":
    main()
