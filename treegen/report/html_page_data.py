"""The data of a run that a page embeds: JSON, gzipped, in base64, in parts of bounded size.

Base64 contains nothing that a browser could take for markup, and the script only displays it as
text. Texts are made safe to display here, by the same rule as for terminals.
"""

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any, Final

from treegen.common.formatting import safe_text
from treegen.errors import TreegenError
from treegen.prompts.images.loading import thumbnail
from treegen.prompts.tree import Node
from treegen.report.curves import (
    INVALID,
    RIGHT,
    SOLVED,
    UNSCORED,
    UNSOLVED,
    WRONG,
    VoteShares,
    classify_sample,
    vote_shares,
)
from treegen.report.plots.figures import PlotLink
from treegen.report.run_document import content_text
from treegen.report.view import ProblemView, RunView, Sample, StoredTree
from treegen.runs.images import RunImages
from treegen.search.tree.records import TreeNode, best_path

MAX_THUMBNAIL_BYTES: Final = 2**24
"""The largest total size of a run's thumbnails in bytes, as data URLs."""
# A part ends with the item that reaches one of these limits.
_MAX_PART_ITEMS: Final = 256
_MAX_PART_CHARS: Final = 200_000
# The number of characters of a question shown in the table of problems.
_QUESTION_CHARS: Final = 300
# The number of characters of a reference answer in the table of problems.
_REFERENCE_CHARS: Final = 80
# The largest number of characters of a node's `data`.
_DATA_CHARS: Final = 2000
# The largest number of characters of a text of an agent's step, and of calls in a step.
_STEP_CHARS: Final = 20_000
_MAX_STEP_CALLS: Final = 100

# The codes of outcomes and of votes in the data, as the scripts of the page read them.
_OUTCOME_CODES: Final = {
    WRONG: "0",
    RIGHT: "1",
    INVALID: "2",
    UNSCORED: "3",
    UNSOLVED: "0",
    SOLVED: "1",
}
_NO_VOTE, _TIED, _WON, _LOST = 0, 1, 2, 3


@dataclass(frozen=True, slots=True)
class PageData:
    """One part of the embedded data: a script element of the page."""

    id: str
    content: str


def make_thumbnails(images: RunImages, max_bytes: int = MAX_THUMBNAIL_BYTES) -> dict[str, str]:
    """Return thumbnails of a run's images as data URLs, by the images' hashes.

    Images that cannot be read are left out.

    Args:
        images: The images of the run.
        max_bytes: The largest total size of the URLs in bytes; further images are left out.
    """
    urls: dict[str, str] = {}
    size = 0
    for image in images.images.values():
        try:
            data = images.content(image.sha256)
            url = None if data is None else thumbnail(data, image.name)
        except TreegenError:  # the image is corrupt, or Pillow is not installed
            continue
        if url is None:
            continue
        size += len(url)
        if size > max_bytes:
            break
        urls[image.sha256] = url
    return urls


def build_page_data(
    view: RunView, name: str, links: Mapping[str, Sequence[PlotLink]]
) -> Iterator[PageData]:
    """Yield the parts of one run in the order in which a page needs them, its index first.

    Args:
        view: The run.
        name: The run's key on the page, which starts the ids of the parts.
        links: The links of the run's pictures, by plot name.
    """
    samples = list(view.samples)
    images_of = make_thumbnails(view.images) if view.images and view.images.images else {}
    images = list(_split_into_parts(list(images_of.values())))
    texts = list(_split_into_parts([safe_text(sample.text) for sample in samples]))
    problems = list(
        _split_into_parts([[safe_text(p.question), safe_text(p.reference)] for p in view.problems])
    )
    trees = list(_split_into_parts([_tree_document(tree) for tree in view.trees]))
    yield _compress_part(
        f"{name}-index",
        {
            "problems": {
                "id": [safe_text(problem.id) for problem in view.problems],
                "prompt_tokens": [problem.prompt_tokens for problem in view.problems],
                "tokens": [_mean_tokens(problem) for problem in view.problems],
                "group": [safe_text(problem.group) for problem in view.problems],
                "question": [_shorten_line(problem.question) for problem in view.problems],
                "reference": [
                    _shorten_line(problem.reference)[:_REFERENCE_CHARS] for problem in view.problems
                ],
                **_image_columns(view.problems, list(images_of)),
            },
            "links": {plot: [link.to_json() for link in own] for plot, own in links.items()},
            "samples": _sample_columns(view, samples),
            "finishes": _list_unique(sample.end_reason for sample in samples),
            "filters": [_filter_columns(view, filter) for filter in view.filters],
            "votes": view.votes,
            "unit": view.unit,
            "statuses": [UNSOLVED, SOLVED] if view.searched else [WRONG, RIGHT, INVALID, UNSCORED],
            "prompts": _list_prompt_nodes(view),
            "trees": [_describe_tree(tree) for tree in view.trees],
            "text_starts": [start for start, _ in texts],
            "problem_starts": [start for start, _ in problems],
            "tree_starts": [start for start, _ in trees],
            "image_starts": [start for start, _ in images],
            "num_images": len(images_of),
        },
    )
    kinds = {"texts": texts, "problems": problems, "trees": trees, "images": images}
    for kind, parts in kinds.items():
        for _, items in parts[:1]:
            yield _compress_part(f"{name}-{kind}-0", items)
    for kind in ("problems", "trees", "texts", "images"):
        for number, (_, items) in enumerate(kinds[kind][1:], start=1):
            yield _compress_part(f"{name}-{kind}-{number}", items)


def _compress_part(id: str, value: Any) -> PageData:
    packed = gzip.compress(json.dumps(value, separators=(",", ":")).encode("ascii"), 5, mtime=0)
    return PageData(id, base64.b64encode(packed).decode("ascii"))


def _split_into_parts(items: Sequence[Any]) -> Iterator[tuple[int, list[Any]]]:
    """Divide items into parts. Yields each part, and the index of its first item."""
    start = size = 0
    for stop, item in enumerate(items, start=1):
        size += len(item) if isinstance(item, str) else len(json.dumps(item))
        if stop - start >= _MAX_PART_ITEMS or size >= _MAX_PART_CHARS or stop == len(items):
            yield start, list(items[start:stop])
            start, size = stop, 0


def _mean_tokens(problem: ProblemView) -> float | None:
    if not problem.samples:
        return None
    return round(sum(s.num_tokens for s in problem.samples) / len(problem.samples), 1)


def _shorten_line(question: str) -> str:
    """Return the first characters of a text in one line."""
    return safe_text(" ".join(question[: 2 * _QUESTION_CHARS].split())[:_QUESTION_CHARS])


def _image_columns(problems: Sequence[ProblemView], names: Sequence[str]) -> dict[str, Any]:
    """Return the column of the problems' images; empty if no problem has an image.

    Args:
        problems: The problems of the run.
        names: The hashes of the images that have a thumbnail.

    Returns:
        For each image a text with its name and size, and the index of its thumbnail or -1.
    """
    if not any(problem.images for problem in problems):
        return {}
    index_of = {sha256: index for index, sha256 in enumerate(names)}
    return {
        "images": [
            [[safe_text(str(image)), index_of.get(image.sha256, -1)] for image in problem.images]
            for problem in problems
        ]
    }


def _list_unique(values: Iterable[str]) -> list[str]:
    return [safe_text(value) for value in dict.fromkeys(values)]


def _sample_columns(view: RunView, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return numbers of the samples as columns.

    The column "first" has the position of each problem's first sample. From this column the page
    computes the problem of each sample. If the indices of each problem's samples are 0, 1, 2 and so
    on, the column "index" is None.
    """
    first = [0]
    for problem in view.problems:
        first.append(first[-1] + len(problem.samples))
    has_all_indices = all(s.index == i for p in view.problems for i, s in enumerate(p.samples))
    finishes = list(dict.fromkeys(sample.end_reason for sample in samples))
    code_of = {reason: number for number, reason in enumerate(finishes)}
    return {
        "first": first,
        "index": None if has_all_indices else [sample.index for sample in samples],
        "tokens": [sample.num_tokens for sample in samples],
        "logprob": [None if s.logprob is None else round(s.logprob, 2) for s in samples],
        "finish": [code_of[sample.end_reason] for sample in samples],
        **_reasoning_columns(samples),
    }


def _reasoning_columns(samples: Sequence[Sample]) -> dict[str, Any]:
    """Return the columns of samples with reasoning, if there are any.

    "thinking" has the number of reasoning tokens. "answer_at" has the offset of the answer in the
    page's text, in UTF-16 code units, as JavaScript counts. Both are -1 for samples without
    reasoning.
    """
    if all(sample.thinking is None for sample in samples):
        return {}
    return {
        "thinking": [-1 if s.thinking is None else s.thinking.num_tokens for s in samples],
        "answer_at": [
            -1 if s.thinking is None else _count_utf16_units(s.parts[0]) for s in samples
        ],
    }


def _count_utf16_units(text: str) -> int:
    return len(safe_text(text).encode("utf-16-le")) // 2


def _filter_columns(view: RunView, name: str) -> dict[str, Any]:
    """Return one filter's verdicts on all samples, and the vote on each problem.

    The columns of samples have codes. Columns of problems: "best" has the position of the first
    sample with the most frequent answer, or -1. "share" has the share of samples with this answer,
    and "right" the share of correct samples.
    """
    answers: dict[str, int] = {}
    outcomes: dict[str, int] = {}
    codes_of: dict[int, tuple[str, int, int]] = {}
    codes: list[tuple[str, int, int]] = []
    for sample in view.samples:
        key = id(sample.verdicts)  # equal verdicts are one object
        if key not in codes_of:
            verdict = sample.verdict(name)
            answer = verdict.answer if verdict else None
            outcome = getattr(verdict, "outcome", "")
            codes_of[key] = (
                _OUTCOME_CODES[classify_sample(sample, name)],
                -1 if answer is None else answers.setdefault(answer, len(answers)),
                outcomes.setdefault(outcome, len(outcomes)) if outcome else -1,
            )
        codes.append(codes_of[key])
    votes, best, first = [], [], 0
    shares = {share.problem_id: share for share in vote_shares(view.verdicts(name))}
    for problem in view.problems:
        vote, chosen = _find_vote(problem, name, shares.get(problem.id))
        votes.append(vote)
        best.append(-1 if chosen is None else first + chosen)
        first += len(problem.samples)
    problem_shares = [shares.get(problem.id) for problem in view.problems]
    return {
        "name": safe_text(name),
        "status": "".join([status for status, _, _ in codes]),
        "answers": [safe_text(text) for text in answers],
        "answer": [number for _, number, _ in codes],
        "outcomes": [safe_text(text) for text in outcomes],
        "outcome": [number for _, _, number in codes] if outcomes else [],
        "vote": votes,
        "best": best,
        "right": [None if share is None else round(share.right, 4) for share in problem_shares],
        "share": [None if share is None else round(share.top_share, 4) for share in problem_shares],
    }


def _find_vote(problem: ProblemView, name: str, share: VoteShares | None) -> tuple[int, int | None]:
    """Return the code of a problem's vote, and the index of the first sample with its winner."""
    if share is None:
        return _NO_VOTE, None
    if share.answer is None:
        return _LOST, None
    verdicts = (sample.verdict(name) for sample in problem.samples)
    chosen, verdict = next((i, v) for i, v in enumerate(verdicts) if v and v.answer == share.answer)
    if share.tied:
        return _TIED, chosen
    return (_WON if verdict.correct else _LOST), chosen


def _list_prompt_nodes(view: RunView) -> list[dict[str, Any]]:
    """Return the tree of prompts as a list of nodes, the root first.

    "below" of a node lists the indices of its children. If the data of the run are not available,
    the tree is a root whose children are the ids of the problems.
    """
    index_of = {problem.id: number for number, problem in enumerate(view.problems)}
    nodes: list[dict[str, Any]] = []
    if view.tree is None:
        below = [
            {"text": p.id, "problem": number, "below": []} for number, p in enumerate(view.problems)
        ]
        nodes = [{"text": "", "below": list(range(1, len(below) + 1))}, *below]
    else:
        stack: list[tuple[Node, str, int | None]] = [(view.tree, "0", None)]
        while stack:
            node, path, parent = stack.pop()
            if parent is not None:
                nodes[parent]["below"].append(len(nodes))
            nodes.append({"text": safe_text(content_text(node)), "below": []})
            if node.num_samples and (node.id or path) in index_of:
                nodes[-1]["problem"] = index_of[node.id or path]
            index = len(nodes) - 1
            children = [(c, f"{path}/{i}", index) for i, c in enumerate(node.children)]
            stack += reversed(children)
    _add_subtree_totals(view, nodes)
    return nodes


def _add_subtree_totals(view: RunView, nodes: list[dict[str, Any]]) -> None:
    """Add to each node the samples, tokens, accuracy and mean logprob of its subtree."""
    sums = [[0, 0, 0, 0, 0.0, 0] for _ in nodes]
    for number in range(len(nodes) - 1, -1, -1):
        total, node = sums[number], nodes[number]
        for sample in view.problems[node["problem"]].samples if "problem" in node else ():
            verdict = sample.verdict(view.headline)
            logprob = 0.0 if sample.logprob is None else sample.logprob
            addends = (
                1,
                sample.num_tokens,
                verdict is not None,
                verdict is not None and verdict.correct,
                logprob,
                sample.logprob is not None,
            )
            total[:] = [a + b for a, b in zip(total, addends, strict=True)]
        for below in node["below"]:
            total[:] = [a + b for a, b in zip(total, sums[below], strict=True)]
        samples, tokens, judged, right, logprobs, num_logprobs = total
        node |= {
            "samples": samples,
            "tokens": tokens,
            "score": right / judged if judged else None,
            "logprob": logprobs / num_logprobs if num_logprobs else None,
        }


def _describe_tree(tree: StoredTree) -> dict[str, Any]:
    """Return the summary of a tree in the index of the page."""
    return {
        "problem_id": safe_text(tree.problem_id),
        "index": tree.repeat,
        "method": safe_text(tree.method),
        "stopped": safe_text(f"error: {tree.error}" if tree.error else tree.stopped),
        "usage": {
            key: value for key, value in tree.usage.items() if isinstance(value, int | float)
        },
        "solved": tree.solved,
        "answer": None if tree.answer is None else safe_text(tree.answer),
        "num_nodes": len(tree.nodes),
        "num_tokens": tree.num_tokens,
    }


def _tree_document(tree: StoredTree) -> dict[str, Any]:
    names = ("id", "parent_id", "score", "logprob", "leaf", "pruned", "finish_reason")
    return {
        "best": sorted(best_path(tree.nodes, tree.marked)),
        "nodes": [
            {
                **{name: node.get(name) for name in names},
                "text": safe_text(str(node.get("text") or "")),
                "n_tokens": int(node.get("n_tokens") or 0),
                **_optional_fields(node),
            }
            for node in tree.nodes
        ],
    }


def _optional_fields(node: TreeNode) -> dict[str, Any]:
    """Return the fields of a node that only some searches record; older records lack them."""
    optional: dict[str, Any] = {}
    for name in ("visits", "prior", "restart"):
        if isinstance(node.get(name), int | float):
            optional[name] = node[name]
    if isinstance(node.get("scores"), Mapping):
        optional["scores"] = {safe_text(str(name)): score for name, score in node["scores"].items()}
    if node.get("pruned_because"):
        optional["pruned_because"] = safe_text(str(node["pruned_because"]))
    if node.get("dropped"):
        optional["dropped"] = True
    if (step := read_step(node.get("data"))) is not None:
        optional["step"] = step
    elif node.get("data") is not None:
        optional["data"] = safe_text(json.dumps(node["data"]))[:_DATA_CHARS]
    return optional


def read_step(data: Any) -> dict[str, Any] | None:
    """Return the step of an agent as texts; None for other data."""
    if not isinstance(data, Mapping) or not ("calls" in data or "end" in data):
        return None
    calls, observations = data.get("calls") or [], data.get("observations") or []
    reward = data.get("reward")
    try:
        return {
            "thoughts": _limit_text(str(data.get("thoughts", ""))),
            "text": _limit_text(str(data.get("text", ""))),
            "calls": [_limit_text(_call_text(call)) for call in calls[:_MAX_STEP_CALLS]],
            "results": [
                _limit_text(_result_text(observation))
                for observation in observations[:_MAX_STEP_CALLS]
            ],
            "end": _limit_text(str(data.get("failure") or data.get("end") or "")),
            "reward": reward if isinstance(reward, int | float) and isfinite(reward) else None,
        }
    except (OverflowError, AttributeError, KeyError, TypeError):  # data of a user's own search
        return None


def _limit_text(text: str) -> str:
    """Return a text for the page, cut if it is long."""
    return safe_text(text if len(text) <= _STEP_CHARS else f"{text[:_STEP_CHARS]} [cut]")


def _call_text(call: Mapping[str, Any]) -> str:
    """Return a call of a tool as people write it: go(direction="north")."""
    arguments = ", ".join(
        f"{name}={json.dumps(value, ensure_ascii=False)}"
        for name, value in call["arguments"].items()
    )
    return f"{call['name']}({arguments})"


def _result_text(observation: Mapping[str, Any]) -> str:
    status = observation.get("exit_status")
    images = observation.get("num_images")
    more = [f"[exit status {status}]"] if status else []
    more += [f"[{images} images]"] if images else []
    more += [f"[{observation['failure']}]"] if observation.get("failure") else []
    return "\n".join([str(observation.get("text", "")), *more])
