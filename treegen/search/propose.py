"""Functions that make next steps of nodes. A strategy takes any function of the type Propose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from treegen.common.checks import check_argument_types, check_int
from treegen.search.event_loop import gather
from treegen.search.tree.node import SearchNode, is_ended

Propose = Callable[[SearchNode], Awaitable[Sequence[SearchNode]]]
"""Makes the next steps of a node, as nodes below it; none at a dead end."""

Step = Callable[[SearchNode, int], Awaitable[Sequence[SearchNode]]]
"""Makes a given number of next steps of a node."""


@check_argument_types
def sample_step(stop: str | Sequence[str] = "\n", **overrides: Any) -> Step:
    """Draw independent continuations, each up to and including a delimiter.

    No step follows a node at which the model has ended the text.

    Args:
        stop: The delimiters; () makes steps of max_tokens tokens.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
    """

    async def step(node: SearchNode, n: int) -> list[SearchNode]:
        if is_ended(node):
            return []
        return await node.sample(n, **{"stop": stop, "include_stop": True, **overrides})

    return step


@check_argument_types
def sample_steps(n: int, stop: str | Sequence[str] = "\n", **overrides: Any) -> Propose:
    """Propose n independent continuations, each up to and including a delimiter.

    Args:
        n: Continuations per node.
        stop: As for `sample_step`.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
    """
    check_int("n", n, minimum=1)
    step = sample_step(stop, **overrides)

    async def propose(node: SearchNode) -> Sequence[SearchNode]:
        return await step(node, n)

    return propose


@check_argument_types
def lines(text: str, node: SearchNode | None = None) -> list[str]:
    """Return each non-blank line of a text, stripped and with a newline at its end."""
    return [line.strip() + "\n" for line in text.split("\n") if line.strip()]


@check_argument_types
def propose_lines(
    prompt_of: Callable[[SearchNode], str],
    parse: Callable[[str, SearchNode], Iterable[str]] = lines,
    *,
    n: int = 1,
    **overrides: Any,
) -> Propose:
    """Ask the model for a list of possible next steps, and append each to the node.

    The model gives the same answers each time that it is asked at one node.

    Args:
        prompt_of: Makes the question, a separate prompt.
        parse: Gets an answer and the node that it is about, and returns the texts to append.
            Duplicate texts are appended once.
        n: Answers to draw.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
    """
    check_int("n", n, minimum=1)

    async def propose(node: SearchNode) -> list[SearchNode]:
        if is_ended(node):
            return []
        key = f"propose {node.key}"
        with node.search.temporary_prompt(prompt_of(node), key=key) as question:
            answers = await question.sample(n, **overrides)
        steps = dict.fromkeys(step for answer in answers for step in parse(answer.text, node))
        return [node.extend(step) for step in steps]

    return propose


@check_argument_types
def combine_proposers(*ways: Propose) -> Propose:
    """Propose the steps of several proposers, in the order of the proposers."""

    async def propose(node: SearchNode) -> list[SearchNode]:
        return [step for steps in await gather(way(node) for way in ways) for step in steps]

    return propose
