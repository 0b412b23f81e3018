"""Small prefill passes, as in search steps with given text, compared with their roofline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from treegen.bench.ceilings import Ceilings
from treegen.bench.roofline import LevelWork, ModelSize, size_of, step_floor
from treegen.bench.table import format_number
from treegen.bench.timing import Spread
from treegen.common.params import SamplingParams
from treegen.llm import LLM
from treegen.prompts.tree import Node
from treegen.report.tables import PrintableTable


@dataclass(frozen=True, slots=True)
class PassTime:
    """The time of passes of one size, run one after another below a prefix."""

    tokens: int
    prefix: int
    passes: int
    """Passes per run."""
    milliseconds: Spread
    """Time per pass."""
    floor_ms: float | None
    """The minimum time of a pass on this device; None if no roofline is available."""
    note: str = ""
    """Why no roofline is available; empty if one is."""

    @property
    def times_floor(self) -> float | None:
        """The median pass time over its roofline."""
        return self.milliseconds.median / self.floor_ms if self.floor_ms else None


def measure(
    llm: LLM, ceilings: Ceilings, sizes: Sequence[int], *, prefix: int, passes: int, repeats: int
) -> Iterator[PassTime]:
    """Time prefill passes of each size, with one prompt per pass below a cached prefix.

    A pass includes drawing the first token after its prompt. A first run of each size is not timed.

    Args:
        llm: The engine.
        ceilings: The device's sustained rates, for the minimum times.
        sizes: Numbers of tokens per pass.
        prefix: Tokens of the prefix.
        passes: Passes per run.
        repeats: Timed runs of each size.

    Raises:
        CapacityError: the prefix, or a prompt, does not fit.
    """
    size = size_of(llm.model)
    rng = np.random.default_rng(0)
    shared = rng.integers(2, llm.spec.vocab_size, prefix).tolist()
    params = SamplingParams(max_tokens=1, ignore_eos=True)
    with llm.keep(Node(shared)):
        for tokens in sizes:
            llm.engine.prefill_chunk = tokens  # a pass has one prompt
            milliseconds = []
            for _ in range(repeats + 1):
                leaves = [
                    Node(rng.integers(2, llm.spec.vocab_size, tokens).tolist(), id=str(number))
                    for number in range(passes)
                ]
                usage = llm.run(Node(shared, children=leaves, samples=0), params).usage
                milliseconds.append(usage.prefill_seconds / passes * 1e3)
            floor, note = None, ""
            if isinstance(size, str):
                note = f"no roofline: {size}"
            else:
                states = 2 * llm.spec.state_bytes  # one state is read, one written
                floor = _floor(size, ceilings, tokens, prefix, states)
            yield PassTime(tokens, prefix, passes, Spread.of(milliseconds[1:]), floor, note)


def pass_table(times: Sequence[PassTime]) -> PrintableTable:
    """Return a table with a row for each size."""
    columns: dict[str, str | Callable[[PassTime], str]] = {
        "Prefix": "{0.prefix:,}",
        "Tokens": "{0.tokens:,}",
        "ms per pass": "{0.milliseconds.median:,.2f}",
        "low-high": "{0.milliseconds.low:,.2f}-{0.milliseconds.high:,.2f}",
        "roofline ms": lambda time: format_number(time.floor_ms, ",.2f"),
        "times the roofline": lambda time: format_number(time.times_floor, ".2f"),
    }
    return PrintableTable.of(times, columns, lines=(time.note for time in times if time.note))


def _floor(size: ModelSize, ceilings: Ceilings, tokens: int, prefix: int, states: float) -> float:
    """Return the least milliseconds of a pass: tokens attend to the prefix and to their prompt."""
    levels = [
        LevelWork("prefix", tokens * prefix, prefix),
        LevelWork("own keys", tokens * (tokens + 1) / 2, tokens),
    ]
    return step_floor(size, ceilings, tokens, levels, states, drawn=1).seconds * 1e3
