"""The tree of a search as plain records, one JSON object for each node."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from treegen.errors import DataError
from treegen.search.tree.node import SearchNode
from treegen.search.tree.text_node import NodeEnd

_DECIMALS: Final = 3  # of a log-probability
_DEPTH: Final = 100  # of what JSON holds in other things
_DIGITS: Final = 4  # decimals of a value, or digits of a smaller one


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node. The field names are those of the JSON object.

    The object leaves out the fields from `visits` on if they have their defaults. What is noise is
    rounded away, because it differs by what was computed beside: `logprob` has 3 decimals, and
    `score`, `prior` and `scores` have 4, or 4 digits if they are small.

    id: 0 for the root; parents come before their children.
    parent_id: id of the node above it; None for the root.
    depth: number of nodes above it.
    text: its own text; the root's is the prompt.
    score: its value; None if it has no finite one.
    logprob: natural-log probability of its own generated tokens. n_tokens: how many these are.
    leaf: whether it has no children.
    pruned: whether the strategy gave it up.
    finish_reason: how its text ended: "stop", "length", "confidence", "error" or "given".
    visits: how often a strategy has counted a value for it; 0 if it does not count visits.
    prior: how likely a strategy found it before it was visited; None if it has none.
    scores: what judged it, by name, and the number that each gave.
    pruned_because: why it was given up, in a few words.
    restart: how often the search had begun again at its root when the node was made.
    data: what the search function noted at it; a value that JSON cannot hold is there as its repr.
    """

    id: int
    parent_id: int | None
    depth: int
    text: str
    score: float | None
    logprob: float
    n_tokens: int
    leaf: bool
    pruned: bool
    finish_reason: NodeEnd
    visits: int = 0
    prior: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    pruned_because: str = ""
    restart: int = 0
    data: object = None

    def to_json(self) -> dict[str, Any]:
        """The record as a JSON object."""
        found = {name: getattr(self, name) for name in _TYPES}
        found["scores"] = dict(self.scores)
        return {
            name: value
            for name, value in found.items()
            if name not in _DEFAULTS or value != _DEFAULTS[name]
        }


_TYPES: Final[dict[str, tuple[type, ...]]] = {
    "id": (int,),
    "parent_id": (int, type(None)),
    "depth": (int,),
    "text": (str,),
    "score": (int, float, type(None)),
    "logprob": (int, float),
    "n_tokens": (int,),
    "leaf": (bool,),
    "pruned": (bool,),
    "finish_reason": (str,),
    "visits": (int,),
    "prior": (int, float, type(None)),
    "scores": (Mapping,),
    "pruned_because": (str,),
    "restart": (int,),
    "data": (object,),
}
# Of fields that a record may lack: those of runs from before have none of them.
_DEFAULTS: Final[dict[str, object]] = {
    "visits": 0,
    "prior": None,
    "scores": {},
    "pruned_because": "",
    "restart": 0,
    "data": None,
}


@dataclass(frozen=True, slots=True)
class SearchTree:
    """All nodes of a search, parents before children, siblings in the order of their paths."""

    nodes: tuple[NodeRecord, ...]

    @staticmethod
    def of(nodes: Sequence[SearchNode]) -> SearchTree:
        """Records of a tree's nodes, parents first."""
        ids = {node: index for index, node in enumerate(nodes)}
        top = nodes[0].depth
        return SearchTree(
            tuple(
                NodeRecord(
                    id=index,
                    parent_id=None if index == 0 or node.parent is None else ids[node.parent],
                    depth=node.depth - top,
                    text=node.text,
                    score=_round_finite(node.value),
                    logprob=round(node.logprob, _DECIMALS),
                    n_tokens=len(node.tokens),
                    leaf=node.is_leaf,
                    pruned=node.pruned,
                    finish_reason=node.finish_reason,
                    visits=node.visits,
                    prior=_round_finite(node.prior),
                    scores=_scores(node.scores),
                    pruned_because=node.pruned_because,
                    restart=node.restart,
                    data=as_json(node.data),
                )
                for index, node in enumerate(nodes)
            )
        )

    def path(self, node: int) -> list[int]:
        """Ids from the root to a node."""
        ids = [node]
        while (parent := self.nodes[ids[-1]].parent_id) is not None:
            ids.append(parent)
        return ids[::-1]

    def path_text(self, node: int) -> str:
        """Text after the prompt, up to and including a node."""
        return "".join(self.nodes[index].text for index in self.path(node)[1:])

    def children(self, node: int) -> list[int]:
        """Ids of the nodes right below one, in order."""
        return [record.id for record in self.nodes if record.parent_id == node]

    def to_jsonl(self) -> str:
        """One JSON object a line, in ASCII."""
        return "".join(json.dumps(node.to_json(), allow_nan=False) + "\n" for node in self.nodes)

    @staticmethod
    def from_jsonl(text: str) -> SearchTree:
        """The tree that `to_jsonl` made a text of; raises DataError for any other text."""
        records = []
        # Not splitlines, which also splits at characters that JSON text may have inside strings.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                raise DataError(
                    f"line {number} of the search tree is not JSON; restore it from a copy"
                ) from None
        return SearchTree.from_json(records)

    @staticmethod
    def from_json(records: Iterable[Mapping[str, Any]]) -> SearchTree:
        """The tree whose nodes are JSON objects; raises DataError if they are no tree."""
        nodes: list[NodeRecord] = []
        for index, record in enumerate(records):
            reason = _wrong(record, index, nodes)
            if reason:
                raise DataError(f"node {index} of the search tree {reason}; restore it from a copy")
            known = {name: record[name] for name in _TYPES if name in record}
            nodes.append(NodeRecord(**known))
        if not nodes:
            raise DataError("the search tree has no nodes; give the text of to_jsonl()")
        inner = {node.parent_id for node in nodes}
        for node in nodes:
            if node.leaf == (node.id in inner):
                told = ("a leaf but has", "children") if node.leaf else ("no leaf but has", "none")
                raise DataError(
                    f"node {node.id} of the search tree is marked as {' '.join(told)}; "
                    "restore it from a copy"
                )
        return SearchTree(tuple(nodes))


def round_value(value: float) -> float:
    """A value without its noise: 4 decimals, or 4 digits if it is small."""
    small = -math.floor(math.log10(abs(value))) - 1 if value else 0
    return round(float(value), _DIGITS + max(0, small))


def _round_finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round_value(value)


def _scores(scores: Mapping[str, float]) -> dict[str, float]:
    found = {str(name): _round_finite(value) for name, value in scores.items()}
    return {name: value for name, value in found.items() if value is not None}


def as_json(value: object) -> object:
    """The value, or its repr if JSON cannot hold it."""
    if _is_json(value):
        return value
    try:
        return repr(value)
    except Exception:  # the repr is somebody's code, and may nest too deeply
        return f"<{type(value).__name__} without a repr>"


def _is_json(value: object, depth: int = 0) -> bool:
    if depth > _DEPTH:  # it may hold itself
        return False
    if isinstance(value, dict):
        parts = value.items()
        return all(isinstance(key, str) and _is_json(each, depth + 1) for key, each in parts)
    if isinstance(value, list | tuple):
        return all(_is_json(each, depth + 1) for each in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int | bool)


def _wrong(record: object, index: int, before: Sequence[NodeRecord]) -> str | None:
    """Why a record cannot be the next node after others; None if it can."""
    if not isinstance(record, Mapping):
        return f"is a {type(record).__name__}, not an object"
    for name, types in _TYPES.items():
        if name not in record:
            if name in _DEFAULTS:
                continue
            return f"lacks {name!r}"
        value = record[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return f"has {name} {value!r}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"has {name} {value}, which is no JSON"
    if record["finish_reason"] not in ("stop", "length", "confidence", "error", "given"):
        return f"has finish_reason {record['finish_reason']!r}"
    if record["id"] != index:
        return f"has the id {record['id']}; ids count from 0"
    parent = record["parent_id"]
    if (parent is None) != (index == 0) or (parent is not None and not 0 <= parent < index):
        return f"has the parent {parent}; parents come first, and only node 0 has none"
    if record["depth"] != (0 if parent is None else before[parent].depth + 1):
        return f"has depth {record['depth']}, which is not one more than its parent's"
    return None


TreeNode = Mapping[str, Any]
"""id, parent_id (None for the root), depth, text, score, logprob, n_tokens, leaf, pruned and
finish_reason of one node; score, logprob and finish_reason may be None. It has visits, prior,
scores, pruned_because, restart and data if they are not empty; see `NodeRecord`."""


def best_path(nodes: Iterable[TreeNode], best: int | None) -> frozenset[int]:
    """Return the ids on the path from the root to the node `best`; empty if there is none."""
    parent = {node["id"]: node["parent_id"] for node in nodes}
    path: set[int] = set()
    while best is not None and best in parent and best not in path:
        path.add(best)
        best = parent[best]
    return frozenset(path)


def children_of(nodes: Sequence[TreeNode]) -> dict[int | None, list[TreeNode]]:
    """Return the nodes below each id, in order; the root is below None."""
    below: dict[int | None, list[TreeNode]] = {}
    for node in nodes:
        below.setdefault(node["parent_id"], []).append(node)
    return below
