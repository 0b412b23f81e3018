"""Functions that give nodes values. A strategy takes any function of the type Evaluate.

An Evaluate gets nodes that compete with each other, such as all candidates of one level. It returns
a finite number for each; higher is better. The strategy stores the number as `node.value`.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from statistics import fmean
from typing import Any, Final
from weakref import WeakKeyDictionary

from treegen.common.checks import check_argument_types, check_int, check_number
from treegen.errors import InputError
from treegen.search.event_loop import gather
from treegen.search.external_calls import Threads, in_thread
from treegen.search.tree.node import Search, SearchNode, is_ended

Evaluate = Callable[[Sequence[SearchNode]], Awaitable[Sequence[float]]]

# "not 2" and "2 or 3" do not count as choices.
_CHOICE: Final = re.compile(
    r"\bbest choice is(?:(?!\bnot\b|n['\u2019]t\b)[^0-9]){0,20}([0-9]{1,9})(?!\.?[0-9])"
    r"(?! ?(?:or|and|/|,) ?[0-9])",
    re.IGNORECASE,
)
_NUMBER: Final = re.compile(r"(?<![0-9])[0-9]{1,9}(?![0-9])")


async def evaluate_nodes(nodes: Sequence[SearchNode], evaluate: Evaluate) -> list[float]:
    """Return the values that `evaluate` gives nodes.

    Raises:
        InputError: It gives a wrong number of values, or a value that is not finite.
    """
    returned = await evaluate(nodes) if nodes else []
    try:
        values = [float(value) for value in returned]
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"evaluate must return a list of numbers, got {returned!r:.200}") from None
    if len(values) != len(nodes):
        raise InputError(
            f"evaluate returned {len(values)} values for {len(nodes)} nodes; return one value "
            "for each node, in order"
        )
    if not all(math.isfinite(value) for value in values):
        raise InputError(f"evaluate must return finite numbers, got {values}")
    return values


async def mean_logprob(nodes: Sequence[SearchNode]) -> list[float]:
    """Return each node's mean log-probability of the generated tokens from the root; 0 if none."""
    return [fmean(node.path_logprobs or (0.0,)) for node in nodes]


async def min_logprob(nodes: Sequence[SearchNode]) -> list[float]:
    """Return each node's lowest log-probability of a generated token from the root; 0 if none."""
    return [min(node.path_logprobs, default=0.0) for node in nodes]


async def sum_logprob(nodes: Sequence[SearchNode]) -> list[float]:
    """Return each node's total log-probability of the generated tokens from the root."""
    return [math.fsum(node.path_logprobs) for node in nodes]


@check_argument_types
def by_function(function: Callable[[SearchNode], float], *, threads: int = 1) -> Evaluate:
    """Evaluate each node by a Python function, in a thread while other searches run.

    Args:
        function: Returns the value of a node.
        threads: Maximum number of concurrent calls. With 1, calls never overlap. With 0, the
            function is called in the searches' own thread, which then waits for it.
    """
    check_int("threads", threads, minimum=0)
    pool = Threads(threads)

    def value(node: SearchNode) -> float:
        return float(function(node))

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        if not threads or not nodes:
            return [value(node) for node in nodes]
        if threads == 1:  # evaluate all nodes in one call
            return await in_thread(nodes[0], lambda: [*map(value, nodes)], threads=pool())
        parts = (in_thread(node, value, node, threads=pool()) for node in nodes)
        return await gather(parts)

    return evaluate


@check_argument_types
def value_prompt(
    prompt_of: Callable[[SearchNode], str],
    read: Callable[[str], float],
    *,
    n: int = 3,
    **overrides: Any,
) -> Evaluate:
    """Ask the model n times to judge each node; the value is the mean of what `read` returns.

    Nodes with the same question have the same value. A search asks each question once.

    Args:
        prompt_of: Makes the question, a separate prompt.
        read: Reads a number from an answer.
        n: Answers to draw per question.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
    """
    check_int("n", n, minimum=1)

    async def judge(search: Search, text: str) -> float:
        with search.temporary_prompt(text, key=f"value {_digest(text)}") as question:
            return fmean([read(answer.text) for answer in await question.sample(n, **overrides)])

    return _once_per_question(prompt_of, judge)


@check_argument_types
def choice_scores(prompt_of: Callable[[SearchNode], str], choices: Mapping[str, float]) -> Evaluate:
    """Score possible answers to a question; a node's value is the expected worth of the answer.

    Nothing is sampled. The answers are scored after the question, and their worths are weighted by
    their probabilities.

    Args:
        prompt_of: Makes the question, a separate prompt.
        choices: Answer -> worth, such as {" sure": 20, " likely": 1, " impossible": 0.001}.
    """
    if not choices:
        raise InputError("choice_scores needs at least one answer to choose from")
    for answer, worth in choices.items():
        check_number(f"choices[{answer!r:.60}]", worth)
    answers, worths = list(choices), list(choices.values())

    async def judge(search: Search, text: str) -> float:
        with search.temporary_prompt(text) as question:
            logprobs = [score.logprob for score in await question.score(answers)]
        top = max(logprobs)
        weights = [math.exp(logprob - top) for logprob in logprobs]
        return sum(w * worth for w, worth in zip(weights, worths, strict=True)) / sum(weights)

    return _once_per_question(prompt_of, judge)


@check_argument_types
def vote_prompt(
    prompt_of: Callable[[Sequence[SearchNode]], str],
    read: Callable[[str, int], int | None] | None = None,
    *,
    n: int = 5,
    **overrides: Any,
) -> Evaluate:
    """Let the model vote between the nodes n times; the value of a node is its share of votes.

    Args:
        prompt_of: Makes the question, which numbers the nodes' texts from 1.
        read: Gets an answer and the number of nodes. It returns the number of the node that the
            answer names, or None if it names none. The default is `read_choice`.
        n: Votes to draw.
        **overrides: Sampling parameters, as for `SearchNode.sample`.
    """
    check_int("n", n, minimum=1)
    reader = read or read_choice

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        if len(nodes) == 1:
            return [1.0]
        text = prompt_of(nodes)
        key = f"vote {_digest(text)}"
        with nodes[0].search.temporary_prompt(text, key=key) as question:
            answers = await question.sample(n, **overrides)
        ballots = [reader(answer.text, len(nodes)) for answer in answers]
        return [ballots.count(number) / n for number in range(1, len(nodes) + 1)]

    return evaluate


@check_argument_types
def read_choice(text: str, num: int) -> int | None:
    """Return the number that a text chooses, from 1 to num; None if it chooses none.

    This is the number after the last "best choice is", or else the only number in the text.
    """
    matches = _CHOICE.findall(text) or (
        numbers if len(numbers := _NUMBER.findall(text)) == 1 else []
    )
    choice = int(matches[-1]) if matches else 0
    return choice if 1 <= choice <= num else None


@check_argument_types
def rollouts(
    n: int,
    done: Callable[[SearchNode], bool],
    evaluate: Evaluate,
    *,
    play: Callable[[SearchNode, int], Awaitable[Sequence[SearchNode]]] | None = None,
    **overrides: Any,
) -> Evaluate:
    """Play n samples to their ends from each node; the value is the mean value of the ends.

    A node that is done, or that the model has ended, is its own end. The ends stay in the tree as
    leaves, with their values.

    Args:
        n: Samples per node.
        done: Whether a node ends a solution.
        evaluate: Gives the values of the ends.
        play: Plays samples of several steps, such as `Agent.play`. A node from which none reaches
            an end has the value 0. Default: one sample each.
        **overrides: Sampling parameters as for `SearchNode.sample`, such as stop=() and a larger
            max_tokens; not with `play`.
    """
    check_int("n", n, minimum=1)

    async def play_to_end(node: SearchNode) -> Sequence[SearchNode]:
        if done(node) or is_ended(node):
            return [node]
        return await (node.sample(n, **overrides) if play is None else play(node, n))

    async def estimate(nodes: Sequence[SearchNode]) -> list[float]:
        ends = await gather(play_to_end(node) for node in nodes)
        values = iter(await evaluate_nodes([end for group in ends for end in group], evaluate))
        means = []
        for node, group in zip(nodes, ends, strict=True):
            worth = [next(values) for _ in group]
            for end, value in zip(group, worth, strict=True):
                if end is not node:
                    end.value = value
                    end.free()
            means.append(fmean(worth) if worth else 0.0)
        return means

    return estimate


@check_argument_types
def along_path(evaluate: Evaluate, combine: Callable[[float, float], float] = min) -> Evaluate:
    """Combine the value of a step with the value of the steps before it.

    Args:
        evaluate: Gives the value of a step.
        combine: Combines the value of the path so far and that of the step. With `min` a path is as
            good as its worst step; with `operator.mul` it is the product of its steps.
    """

    async def accumulate(nodes: Sequence[SearchNode]) -> list[float]:
        step_values = await evaluate_nodes(nodes, evaluate)
        before = [_value_above(node) for node in nodes]
        return [
            value if above is None else combine(above, value)
            for above, value in zip(before, step_values, strict=True)
        ]

    return accumulate


def _value_above(node: SearchNode) -> float | None:
    above = node.parent
    while above is not None and above.value is None:
        above = above.parent
    return None if above is None else above.value


def _once_per_question(
    prompt_of: Callable[[SearchNode], str], judge: Callable[[Search, str], Awaitable[float]]
) -> Evaluate:
    """Evaluate nodes by a question; a search asks the same question once."""
    # Keyed by search, because a search's draws must not depend on searches that ran before it.
    values_by_search: WeakKeyDictionary[Search, dict[str, float]] = WeakKeyDictionary()
    pending_by_search: WeakKeyDictionary[Search, dict[str, asyncio.Event]] = WeakKeyDictionary()

    async def ask(search: Search, text: str) -> None:
        values, pending = values_by_search[search], pending_by_search.setdefault(search, {})
        while text in pending:  # another part of the search asks; if that part fails, ask here
            await pending[text].wait()
        if text in values:
            return
        pending[text] = asyncio.Event()
        try:
            values[text] = await judge(search, text)
        finally:
            pending.pop(text).set()

    async def evaluate(nodes: Sequence[SearchNode]) -> list[float]:
        if not nodes:
            return []
        search = nodes[0].search
        values = values_by_search.setdefault(search, {})
        questions = [prompt_of(node) for node in nodes]
        new = [text for text in dict.fromkeys(questions) if text not in values]
        await gather(ask(search, text) for text in new)
        return [values[text] for text in questions]

    return evaluate


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
