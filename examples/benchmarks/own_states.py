"""What sharing recurrent states saves: rows below one state, against rows with states of their own.

The figures of docs/performance.md come from commands such as

    python examples/benchmarks/own_states.py --shape qwen3.6-35b-a3b --rows 1024 --prefix 1024 \\
        --new-tokens 128 --repeats 1 --ceiling-seconds 0.1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import click

from treegen.bench.decode import Bench, WorkloadResult, rows_that_fit
from treegen.bench.workloads import Case, Workload, decode_cases
from treegen.cli.bench.decode import run_cases
from treegen.cli.bench.options import RUNS, int_list_option, int_option, shape_or_model
from treegen.cli.main import script
from treegen.cli.options.options import add_options
from treegen.cli.terminal.render import json_line
from treegen.errors import InputError
from treegen.llm import LLM

OWN_STATES: Final = "own-states"
"""The mode in which each row reads and writes its own recurrent state in each step."""


class OwnStatesBench(Bench):
    """Runs treegen's modes, and then rows that keep states of their own."""

    def measure(self, cases: Sequence[Case]) -> Iterator[WorkloadResult]:
        """Yield results as they arrive."""
        yield from super().measure(cases)
        model, spec = self.model, self.model.spec
        model.spec = replace(spec, delta=None)  # without update lists
        try:
            for case in cases:
                yield from self.measure_modes(case.workload, [OWN_STATES])
        finally:
            self.close()
            model.spec = spec

    def rows(self, llm: LLM, workload: Workload, mode: str) -> int:
        """Return how many rows to decode at once: with own states, as many as fit."""
        rows = super().rows(llm, workload, mode)
        if mode != OWN_STATES:
            return rows
        return max(min(rows, rows_that_fit(llm, self.plan(llm, workload, mode, rows))), 1)


@script
@click.option(
    "--shape", metavar="NAME", help="Random weights of this shape. Default: qwen3.6-35b-a3b."
)
@int_list_option("--rows", "Samples decoded at once.", default="1024")
@int_list_option("--prefix", "Prompt tokens that all share.", default="1024")
@int_option("--new-tokens", 128, "Tokens of each sample.", minimum=2)
@add_options(*RUNS)
def main(
    shape: str | None, rows: list[int], prefix: list[int], new_tokens: int, **options: Any
) -> None:
    """Rows of a model with recurrent layers, below one state and with states of their own."""
    if options["ranks"] > 1:
        raise InputError("--tp is not supported by this benchmark; remove --tp")
    shape = shape_or_model(shape, options["model"], "qwen3.6-35b-a3b")
    cases = decode_cases(rows, prefix, new_tokens, modes=("all",))
    _, document = run_cases(cases, shape, options, bench_type=OwnStatesBench)
    json_line({"bench": "decode", **document})


if __name__ == "__main__":
    main()
