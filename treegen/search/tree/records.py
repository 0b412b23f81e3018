"""The tree of a search as plain records, one JSON object per node, and drawn in a terminal."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from types import UnionType
from typing import TYPE_CHECKING, Any, Final, get_args, get_origin, get_type_hints

from treegen.common.checks import check_argument_types, is_finite
from treegen.common.formatting import safe_text
from treegen.errors import DataError, InputError
from treegen.search.tree.graphs import describe_ended, to_dot, to_mermaid, to_svg
from treegen.search.tree.node import SearchNode
from treegen.search.tree.text_node import NodeEnd

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

_DECIMALS: Final = 3  # decimals of a log-probability
_DEPTH: Final = 100  # maximum nesting of JSON values
_DIGITS: Final = 4  # decimals of a value, or digits of a smaller one
# Maximum number of characters of a text, and of the end of a prompt, in a terminal, which cuts the
# line at its width anyway.
_MAX_SHOWN_CHARS: Final = 1000
_PROMPT_END: Final = 80
_LINE_BREAK: Final = " \u21b5 "


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node. The field names are those of the JSON object.

    The object omits fields from `visits` on that have their defaults. Rounding removes noise that
    depends on what was computed in the same batch: `logprob` has 3 decimals, and `score`, `prior`
    and `scores` have 4, or 4 digits if they are small.
    """

    id: int
    """0 for the root; parents come before their children."""
    parent_id: int | None
    """Id of the node above it; None for the root."""
    depth: int
    """Number of nodes above it."""
    text: str
    """Its own text; the root's is the prompt."""
    score: float | None
    """Its value; None if it has no finite one."""
    logprob: float
    """Natural-log probability of its own generated tokens."""
    n_tokens: int
    """Number of these tokens."""
    leaf: bool
    """Whether it has no children."""
    pruned: bool
    """Whether the strategy pruned it."""
    finish_reason: NodeEnd
    """How its text ended: "stop", "length", "confidence", "error" or "given"."""
    visits: int = 0
    """How often a strategy has counted a value for it; 0 if it does not count visits."""
    prior: float | None = None
    """How likely a strategy found it before it was visited; None if it has none."""
    scores: Mapping[str, float] = field(default_factory=dict)
    """The number that each scorer gave it, by the scorer's name."""
    pruned_because: str = ""
    """Why it was pruned, in a few words."""
    dropped: bool = False
    """Whether the search function dropped it, or a node above it."""
    restart: int = 0
    """How often the search had started again at its root when the node was made."""
    data: object = None
    """What the search function stored at it; the repr of a value that JSON cannot hold."""

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        values = {name: getattr(self, name) for name in _TYPES}
        values["scores"] = dict(self.scores)
        return {
            name: value
            for name, value in values.items()
            if name not in _DEFAULTS or value != _DEFAULTS[name]
        }


def _types_in_json(annotation: Any) -> tuple[type, ...]:
    """Return the types that values of a field have when they are read from JSON."""
    if isinstance(annotation, UnionType):
        return tuple(kind for part in get_args(annotation) for kind in _types_in_json(part))
    if annotation is float:
        return int, float
    return (str if annotation is NodeEnd else get_origin(annotation) or annotation,)


_TYPES: Final = {
    name: _types_in_json(annotation) for name, annotation in get_type_hints(NodeRecord).items()
}
# Defaults of optional fields, which records of older runs do not have.
_DEFAULTS: Final[dict[str, object]] = {"scores": {}} | {
    item.name: item.default for item in fields(NodeRecord) if item.default is not MISSING
}


@dataclass(frozen=True, slots=True)
class SearchTree:
    """All nodes of a search, parents before children, siblings in the order of their paths."""

    nodes: tuple[NodeRecord, ...]

    @staticmethod
    def of(nodes: Sequence[SearchNode]) -> SearchTree:
        """Return the records of a tree's nodes, parents first."""
        ids = {node: index for index, node in enumerate(nodes)}
        top = nodes[0].depth
        return SearchTree(
            tuple(
                NodeRecord(
                    id=index,
                    parent_id=None if index == 0 or node.parent is None else ids[node.parent],
                    depth=node.depth - top,
                    text=node.text,
                    score=_round_finite("value", node.value),
                    logprob=round(node.logprob, _DECIMALS),
                    n_tokens=len(node.tokens),
                    leaf=node.is_leaf,
                    pruned=node.pruned,
                    finish_reason=node.finish_reason,
                    visits=node.visits,
                    prior=_round_finite("prior", node.prior),
                    scores=_scores(node.scores),
                    pruned_because=node.pruned_because,
                    dropped=node.dropped,
                    restart=node.restart,
                    data=as_json(node.data),
                )
                for index, node in enumerate(nodes)
            )
        )

    def path(self, node: int) -> list[int]:
        """Return the ids from the root to a node."""
        ids = [node]
        while (parent := self.nodes[ids[-1]].parent_id) is not None:
            ids.append(parent)
        return ids[::-1]

    def path_text(self, node: int) -> str:
        """Return the text after the prompt, up to and including a node."""
        return "".join(self.nodes[index].text for index in self.path(node)[1:])

    def children(self, node: int) -> list[int]:
        """Return the ids of a node's children, in order."""
        return [record.id for record in self.nodes if record.parent_id == node]

    def to_dot(self, best: int | None = None, *, name: str = "tree") -> str:
        """Return the tree in the language of Graphviz: the best path bold, ended nodes dashed.

        Args:
            best: The id of the node where the best path ends, such as `SearchResult.best`.
            name: The name of the graph.
        """
        nodes = [node.to_json() for node in self.nodes]
        return to_dot(nodes, best_path(nodes, best), name)

    def to_mermaid(self, best: int | None = None) -> str:
        """Return the tree as a Mermaid flowchart: the best path thick, ended nodes dashed.

        Args:
            best: The id of the node where the best path ends, such as `SearchResult.best`.
        """
        nodes = [node.to_json() for node in self.nodes]
        return to_mermaid(nodes, best_path(nodes, best))

    def to_svg(self, best: int | None = None) -> str:
        """Return the tree as SVG: the best path bold, ended nodes dashed.

        Args:
            best: The id of the node where the best path ends, such as `SearchResult.best`.
        """
        nodes = [node.to_json() for node in self.nodes]
        return to_svg(nodes, best_path(nodes, best))

    def __repr__(self) -> str:
        return f"SearchTree({len(self.nodes):,} nodes)"

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def to_jsonl(self) -> str:
        """Return the tree as text: one JSON object per line, in ASCII."""
        return "".join(json.dumps(node.to_json(), allow_nan=False) + "\n" for node in self.nodes)

    @staticmethod
    def from_jsonl(text: str) -> SearchTree:
        """Return the tree from the text of `to_jsonl`.

        Raises:
            DataError: The text is not such a tree.
        """
        records = []
        # splitlines would also split at characters that JSON strings may contain.
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                records.append(json.loads(line))
            except (ValueError, RecursionError):
                raise DataError(
                    f"line {number} of the search tree is not JSON; restore the tree from a copy"
                ) from None
        return SearchTree.from_json(records)

    @staticmethod
    def from_json(records: Iterable[Mapping[str, Any]]) -> SearchTree:
        """Return the tree whose nodes are the given JSON objects.

        Raises:
            DataError: The objects do not form a tree.
        """
        nodes: list[NodeRecord] = []
        for index, record in enumerate(records):
            reason = _describe_fault(record, index, nodes)
            if reason:
                raise DataError(
                    f"node {index} of the search tree {reason}; restore the tree from a copy"
                )
            values = {name: record[name] for name in _TYPES if name in record}
            nodes.append(NodeRecord(**values))
        if not nodes:
            raise DataError("the search tree has no nodes; pass the text of to_jsonl()")
        inner = {node.parent_id for node in nodes}
        for node in nodes:
            if node.leaf == (node.id in inner):
                claim = ("a leaf but has", "children") if node.leaf else ("no leaf but has", "none")
                raise DataError(
                    f"node {node.id} of the search tree is marked as {' '.join(claim)}; restore "
                    "the tree from a copy"
                )
        return SearchTree(tuple(nodes))


def round_value(value: float) -> float:
    """Round a value to remove noise: to 4 decimals, or to 4 digits if it is small."""
    small = -math.floor(math.log10(abs(value))) - 1 if value else 0
    return round(float(value), _DIGITS + max(0, small))


def _round_finite(name: str, value: float | None) -> float | None:
    try:
        return None if value is None or not is_finite(value) else round_value(value)
    except (TypeError, ValueError):
        raise InputError(f"{name} of a node must be a number, got {value!r:.80}") from None


def _scores(scores: Mapping[str, float]) -> dict[str, float]:
    rounded = {
        str(name): _round_finite(f"scores[{name!r}]", value) for name, value in scores.items()
    }
    return {name: value for name, value in rounded.items() if value is not None}


def as_json(value: object) -> object:
    """Return the value, or its repr if JSON cannot hold it."""
    if _is_json(value):
        return value
    try:
        return repr(value)
    except Exception:  # the repr is user code, and the value may be nested too deeply
        return f"<{type(value).__name__} without a repr>"


def _is_json(value: object, depth: int = 0) -> bool:
    if depth > _DEPTH:  # the value may contain itself
        return False
    if isinstance(value, dict):
        parts = value.items()
        return all(isinstance(key, str) and _is_json(item, depth + 1) for key, item in parts)
    if isinstance(value, list | tuple):
        return all(_is_json(item, depth + 1) for item in value)
    if isinstance(value, float):
        return math.isfinite(value)
    return value is None or isinstance(value, str | int | bool)


def _describe_fault(record: object, index: int, before: Sequence[NodeRecord]) -> str | None:
    """Return why a record cannot be the next node after `before`; None if it can."""
    if not isinstance(record, Mapping):
        return f"is a {type(record).__name__}, not an object"
    for name, types in _TYPES.items():
        if name not in record:
            if name in _DEFAULTS:
                continue
            return f"has no field {name!r}"
        value = record[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            return f"has {name} {value!r}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"has {name} {value}, which is not JSON"
    if record["finish_reason"] not in get_args(NodeEnd):
        return f"has finish_reason {record['finish_reason']!r}"
    if record["id"] != index:
        return f"has the id {record['id']}, but ids must count up from 0"
    parent = record["parent_id"]
    if (parent is None) != (index == 0) or (parent is not None and not 0 <= parent < index):
        return (
            f"has the parent {parent}, but parents must come first, and only node 0 has no parent"
        )
    if record["depth"] != (0 if parent is None else before[parent].depth + 1):
        return f"has depth {record['depth']}, which is not the depth of its parent plus 1"
    return None


TreeNode = Mapping[str, Any]
"""One node as a JSON object, with the fields id, parent_id (None for the root), depth, text, score,
logprob, n_tokens, leaf, pruned and finish_reason; score, logprob and finish_reason may be None. The
fields visits, prior, scores, pruned_because, dropped, restart and data are optional; see
`NodeRecord`."""


def best_path(nodes: Iterable[TreeNode], best: int | None) -> frozenset[int]:
    """Return the ids on the path from the root to the node `best`; empty if `best` is None."""
    parent = {node["id"]: node["parent_id"] for node in nodes}
    path: set[int] = set()
    while best is not None and best in parent and best not in path:
        path.add(best)
        best = parent[best]
    return frozenset(path)


def children_of(nodes: Sequence[TreeNode]) -> dict[int | None, list[TreeNode]]:
    """Return the children of each id, in order; the root is the child of None."""
    below: dict[int | None, list[TreeNode]] = {}
    for node in nodes:
        below.setdefault(node["parent_id"], []).append(node)
    return below


@check_argument_types
def draw_tree(
    nodes: Sequence[NodeRecord | TreeNode], best: int | None = None, *, full: bool = False
) -> Tree:
    """Return a rich Tree for the terminal. The path to the node `best` is bold and marked with *.

    Args:
        nodes: Nodes of a `SearchTree`, or records as in `trees.jsonl`, parents before children.
        best: Id of the node to mark the path to; None marks no path.
        full: Whether a text may take many lines. Otherwise each node is one line, cut at the width
            of the terminal.
    """
    from rich.tree import Tree

    records = [node.to_json() if isinstance(node, NodeRecord) else node for node in nodes]
    path, below = best_path(records, best), children_of(records)
    restart_of = {node["id"]: node.get("restart") or 0 for node in records}
    top = Tree("", hide_root=True)
    # No recursion, because a chain of thoughts may be deeper than the interpreter allows.
    stack = [(top, node) for node in reversed(below.get(None, []))]
    while stack:
        branch, node = stack.pop()
        restart = restart_of[node["id"]]
        is_first = restart != restart_of.get(node["parent_id"], 0)
        label = _label(node, node["id"] in path, restart=restart if is_first else 0, full=full)
        inner = branch.add(label)
        stack += [(inner, child) for child in reversed(below.get(node["id"], []))]
    return top.children[0] if len(top.children) == 1 else top


def _label(node: TreeNode, on_path: bool, *, restart: int, full: bool) -> Text:
    """Return the line of a node.

    Args:
        node: The node.
        on_path: Whether it is on the best path.
        restart: The number of the search's restart that begins with the node; 0 if none does.
        full: Whether the text may take many lines.
    """
    from rich.text import Text

    num_tokens = node.get("n_tokens") or 0  # a prompt has none
    facts = [] if node.get("score") is None else [f"score {node['score']:.3f}"]
    if node.get("visits"):
        facts.append(f"visits {node['visits']:,}")
    if num_tokens and node.get("logprob") is not None:
        facts.append(f"logprob {node['logprob']:.2f}")
    if num_tokens:
        facts.append(f"{num_tokens:,} tokens")
    if node.get("leaf") and node.get("finish_reason") == "length":
        facts.append("cut off")
    if restart:
        facts.append(f"restart {restart:,}")
    if ended := describe_ended(node):
        facts.append(ended)
    label = Text(no_wrap=not full, overflow="fold" if full else "ellipsis")
    label.append("* " if on_path else "", style="bold")
    label.append(f"[{', '.join(facts)}] " if facts else "", style="dim")
    text = str(node.get("text") or "")
    if node.get("parent_id") is None and not full:
        line = _shorten_prompt(text)
    else:
        line = " ".join(safe_text(text if full else text[:_MAX_SHOWN_CHARS]).split())
    label.append(line or "(empty)", style="bold" if on_path else "")
    return label


def _shorten_prompt(text: str) -> str:
    """Return the last lines of a prompt as one line, because the question is there."""
    end = text.rstrip()[-_MAX_SHOWN_CHARS:]
    lines = [" ".join(safe_text(line).split()) for line in end.splitlines()]
    shown = lines[-1:]
    for line in reversed(lines[:-1]):
        if not line or len(_LINE_BREAK.join((line, *shown))) > _PROMPT_END:
            break
        shown.insert(0, line)
    short = _LINE_BREAK.join(shown)
    if len(short) > _PROMPT_END:
        return f"...{short[-_PROMPT_END:]}"
    is_whole = len(shown) == len(lines) and len(end) == len(text.rstrip())
    return short if is_whole else f"... {short}"
