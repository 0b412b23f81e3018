"""Converts nodes, scores and usage to the JSON of the protocol of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from treegen.common.outputs import Completion, Score
from treegen.integrations.nodes import protocol
from treegen.integrations.server.nodes import ServedNode
from treegen.integrations.server.requests import RequestError
from treegen.search.budgeted_search import BudgetedSearch

_MAX_LOGPROBS: Final = 2**21  # log-probabilities of the scores of one answer, with alternatives
_MIN_LOGPROB: Final = -9999.0  # replaces minus infinity, for which JSON has no number


def describe_node(node: ServedNode, text: str = "") -> protocol.NodeAnswer:
    """Return the JSON of a node.

    Args:
        node: The node.
        text: Its text. Default: empty, because the client has just sent it.
    """
    completion, tree = node.completion, node.tree
    answer = protocol.NodeAnswer(
        id=node.id,
        tree=tree.root.id,
        parent=node.parent.id if node.parent is not None else None,
        path=node.path,
        depth=node.depth,
        index=node.index,
        seed=tree.params.seed if node.parent is None else None,
        origin=tree.origin if node.parent is None else None,
        text=text if completion is None else completion.text,
        token_ids=[],
        logprobs=[],
        finish_reason="given",
        num_context_tokens=node.context.num_tokens,
        num_tokens=node.num_tokens,
        num_children=len(node.children),
        expires_in=tree.expires_in(),
    )
    if completion is not None:
        _add_sample(answer, completion)
    return answer


def _add_sample(answer: protocol.NodeAnswer, completion: Completion) -> None:
    answer.seed = completion.seed
    answer.token_ids = list(completion.tokens)
    answer.logprobs = _limit_logprobs(completion.logprobs)
    answer.top_logprobs = [_limit_pairs(pairs) for pairs in completion.top_logprobs]
    answer.finish_reason, answer.stop = completion.finish_reason, completion.stop
    answer.confidences = list(completion.confidences)
    answer.certainties = list(completion.certainties)
    answer.versions = list(completion.versions)
    if completion.thinking is not None:
        answer.thinking = protocol.NodeThinking(**asdict(completion.thinking))


def describe_score(score: Score) -> protocol.ScoreAnswer:
    """Return the JSON of a score."""
    top = score.top.pairs() if score.top is not None else ()
    return protocol.ScoreAnswer(
        logprob=max(score.logprob, _MIN_LOGPROB),
        token_ids=list(score.tokens),
        logprobs=_limit_logprobs(score.logprobs),
        is_greedy=bool(score.is_greedy),
        top_logprobs=[_limit_pairs(pairs) for pairs in top],
    )


def _limit_logprobs(logprobs: Sequence[float]) -> list[float]:
    return [max(logprob, _MIN_LOGPROB) for logprob in logprobs]


def _limit_pairs(pairs: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    return [(token, max(logprob, _MIN_LOGPROB)) for token, logprob in pairs]


def usage_of(search: BudgetedSearch) -> protocol.NodeUsage:
    """Return the JSON of what an operation has taken."""
    usage = search.usage
    return protocol.NodeUsage(
        decoded_tokens=usage.tokens_decoded, prefilled_tokens=usage.tokens_prefilled
    )


def sum_usages(usages: Sequence[protocol.NodeUsage]) -> protocol.NodeUsage:
    """Return what several operations have taken together."""
    return protocol.NodeUsage(
        decoded_tokens=sum(usage.decoded_tokens for usage in usages),
        prefilled_tokens=sum(usage.prefilled_tokens for usage in usages),
    )


def describe_subtree(
    node: ServedNode, text: str, cached: int, memory: protocol.Memory
) -> protocol.ReadResult:
    """Return the JSON of a node with what it and the nodes below it take.

    Args:
        node: The node.
        text: Its text.
        cached: How many of its tokens are in the cache.
        memory: What the nodes of its client take.
    """
    children = sorted(node.children, key=lambda child: (child.completion is None, child.index))
    below = list(node.walk())
    return protocol.ReadResult(
        node=describe_node(node, text),
        children=[child.id for child in children],
        subtree_nodes=len(below),
        subtree_tokens=sum(other.num_tokens for other in below),
        cached_tokens=cached,
        memory=memory,
    )


def count_cached(node: ServedNode) -> int:
    """Return how many of a node's tokens are in the cache."""
    start, total = node.context.num_tokens - node.num_tokens, 0
    for segment in node.context.segment.path():
        stop = segment.computed if segment.table is not None else segment.start
        total += max(0, stop - max(segment.start, start))
        if segment.start <= start:
            break
    return total


def check_answer_size(operations: Sequence[protocol.ScoreFields]) -> None:
    """Raise RequestError if the scores of some operations may be too many for one response."""
    num_logprobs = sum(sum(map(len, op.texts)) * (op.top + 1) for op in operations)
    if num_logprobs > _MAX_LOGPROBS:
        raise RequestError(
            f"the request may return {num_logprobs:,} log-probabilities, more than the limit of "
            f"{_MAX_LOGPROBS:,} per response; score fewer texts, or request fewer alternatives",
            "top" if any(op.top for op in operations) else "texts",
        )
