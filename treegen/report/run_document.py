"""The output of `treegen show` about a run and its problems, as documents and as text."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, cast

from treegen.common.formatting import format_table, safe_text
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError
from treegen.evals.statistics.votes import majority_vote
from treegen.evals.thinking import thinking_to_json
from treegen.prompts.images.loading import describe_content
from treegen.prompts.tree import Node, prompts_of
from treegen.report.curves import VoteShares, classify_sample, vote_shares
from treegen.report.tables import PrintableTable, table_listing
from treegen.report.view import ProblemView, RunView, Sample, StoredTree

_MAX_LISTED: Final = 20  # problems or searches without --full
_MAX_REASONING_CHARS: Final = 120  # characters shown of a sample's reasoning without --full


def filter_of(view: RunView, name: str | None) -> str:
    """Return the filter that a user names, by default the headline's; "" if nothing is scored."""
    if name is not None and name not in view.filters:
        known = ", ".join(view.filters) or "none"
        raise InputError(f"the run has no verdicts of the filter {name!r}; its filters: {known}")
    return name or view.headline


def problem_of(view: RunView, problem_id: str) -> ProblemView:
    """Return the problem with an id; raise InputError if there is none."""
    for problem in view.problems:
        if problem.id == problem_id:
            return problem
    ids = [problem.id for problem in view.problems]
    hint = did_you_mean(problem_id, ids)
    hint = hint or f"; its problems: {', '.join(ids[:3])}{' and so on' if len(ids) > 3 else ''}"
    raise InputError(f"the run has no problem {problem_id!r}{hint}")


def run_document(view: RunView, shares: Sequence[VoteShares]) -> dict[str, Any]:
    """Return the content of a run as JSON values.

    Args:
        view: The run.
        shares: The votes that `get_vote_shares` returns.
    """
    return {
        "task": view.task,
        "planned": view.info.planned,
        "done": view.num_done,
        "report": view.report.to_json() if view.report else None,
        "problems": [
            {"id": s.problem_id, "right": s.right, "tied": s.tied, "won": s.won} for s in shares
        ],
        **({"judged": [summary.to_json() for summary in view.summaries]} if view.summaries else {}),
        "trees": [
            {"id": t.problem_id, "index": t.repeat, "solved": t.solved, "answer": t.answer}
            for t in view.trees
        ],
    }


def problems_text(view: RunView, shares: Sequence[VoteShares], *, full: bool) -> str:
    """Return the problems of a run, and its searches, as text for people.

    Args:
        view: The run.
        shares: As `get_vote_shares` returns them.
        full: Whether to list all problems and searches; otherwise only the first ones.
    """
    lines = [f"\n{table_listing(table)}" for table in view.judged]
    if shares and not view.searched:
        rows = [
            [s.problem_id, f"{s.right:.3f}", f"{s.invalid:.3f}", _describe_vote(s.won, s.tied)]
            for s in (shares if full else shares[:_MAX_LISTED])
        ]
        lines.append(
            "\n" + format_table(["Problem", "Right", "Invalid", "Vote"], rows, right=(1, 2))
        )
        if len(rows) < len(shares):
            lines.append(f"... and {len(shares) - len(rows):,} harder problems (--full)")
        lines.append("--problem ID shows one problem, --tree ID its tree\n")
    if view.trees:
        lines.append("\n" + _format_searches(view.trees if full else view.trees[:_MAX_LISTED]))
        if len(view.trees) > _MAX_LISTED and not full:
            lines.append(f"... and {len(view.trees) - _MAX_LISTED:,} more (--full)")
        lines.append("--tree ID shows one tree\n")
    return "\n".join(lines)


def get_vote_shares(view: RunView, filter: str) -> list[VoteShares]:
    """Return the votes of a run's problems.

    Args:
        view: The run.
        filter: The filter that reads the answers; "" returns no votes.
    """
    return vote_shares(view.verdicts(filter)) if filter else []


def _describe_vote(won: bool, tied: bool) -> str:
    return {
        (True, False): "won",
        (True, True): "tied for first",
        (False, True): "lost (wrong answers tie)",
    }.get((won, tied), "lost")


def _format_searches(trees: tuple[StoredTree, ...]) -> str:
    """Return a table with one line for each search."""
    solved = {True: "yes", False: "no", None: ""}
    several = any(tree.repeat for tree in trees)
    columns: dict[str, str | Callable[[StoredTree], str]] = {
        "Problem": tree_name if several else "{0.problem_id}",
        "Search": "{0.method}",
        "Solved": lambda tree: "failed" if tree.error else solved[tree.solved],
        "Answer": lambda tree: tree.answer or "",
        "Nodes": lambda tree: f"{len(tree.nodes):,}",
        "Decoded tokens": "{0.num_tokens:,}",
    }
    return str(PrintableTable.of(trees, columns, words=[*columns][:4]))


def tree_name(tree: "StoredTree") -> str:
    """Return the name of a search, such as "q7 #0": the id of its problem and its index."""
    return f"{tree.problem_id} #{tree.repeat}"


def problem_document(problem: ProblemView, filter: str) -> dict[str, Any]:
    """Return a problem with its samples and their votes, as JSON values."""
    answers = {s.index: _read_answer(s, filter) for s in problem.samples}
    vote = majority_vote(answers.values())
    return {
        "problem": problem.id,
        "question": problem.question,
        "answer": problem.answer,
        **({"images": [image.document for image in problem.images]} if problem.images else {}),
        "vote": {"answer": vote.answer, "votes": vote.votes, "tied": list(vote.tied)},
        "samples": [
            {
                "index": s.index,
                "answer": answers[s.index],
                "outcome": classify_sample(s, filter),
                "finish_reason": s.finish_reason,
                "num_tokens": s.num_tokens,
                "logprob": s.logprob,
                "text": s.text,
                **({} if s.thinking is None else {"thinking": thinking_to_json(s.thinking)}),
            }
            for s in problem.samples
        ],
    }


def problem_text(view: RunView, problem: ProblemView, filter: str, *, full: bool) -> str:
    """Return a problem with its samples and their votes, as text for people.

    Args:
        view: The run.
        problem: The problem.
        filter: The filter that reads the answers.
        full: Whether to show whole texts; otherwise long ones are cut.
    """
    answers = [_read_answer(sample, filter) for sample in problem.samples]
    vote = majority_vote(answers)
    limit = None if full else 2000
    length = f", prompt of {problem.prompt_tokens:,} tokens" if problem.prompt_tokens else ""
    lines = [safe_text(f"problem {problem.id}{length}\n")]
    if problem.images:
        lines.append("".join(f"image: {_clip(str(image), 300)}\n" for image in problem.images))
    for title, text in (("question", problem.question), ("reference", problem.reference)):
        if text:
            lines.append(f"{title}: {_clip(text, limit)}\n")
    if vote.answer is not None:
        samples_of: dict[str, list[Sample]] = {}
        for sample, answer in zip(problem.samples, answers, strict=True):
            samples_of.setdefault("(none)" if answer is None else answer, []).append(sample)
        ranked = sorted(samples_of.items(), key=lambda item: -len(item[1]))
        rows = [
            [
                _clip(answer, 60),
                str(len(samples)),
                "*" if answer in vote.tied else "",
                classify_sample(samples[0], filter),
            ]
            for answer, samples in ranked
        ]
        voters = "Searches" if view.searched else "Votes"  # each search is one answer
        columns = [f"Answer ({filter})", voters, "Most", "Verdict"]
        lines.append(f"{format_table(columns, rows, right=(1,))}\n")
    for s in problem.samples:
        name = f"{'search' if view.searched else 'sample'} {s.index}"
        if view.searched and view.num_samples == 1:
            name = "search"
        logprob = "" if s.logprob is None else f", logprob {s.logprob:.2f}"
        lines.append(
            safe_text(
                f"--- {name}: {classify_sample(s, filter)}, {s.num_tokens:,} tokens{logprob}, "
                f"ended by {s.end_reason}"
            )
        )
        thinking, answer = s.parts
        if s.thinking is not None:
            head = f"[reasoning, {s.thinking.num_tokens:,} tokens]"
            lines.append(
                f"{head} {_clip(thinking, limit if full else _MAX_REASONING_CHARS)}\n[answer]"
            )
        lines.append(_clip(answer, limit) + "\n")
    return "\n".join(lines)


def _read_answer(sample: Sample, filter: str) -> str | None:
    verdict = sample.verdict(filter)
    return None if verdict is None else verdict.answer


def _clip(text: str, limit: int | None) -> str:
    """Return the first characters of a text, and how many there are; all if `limit` is None."""
    if limit is None or len(text) <= limit:
        return safe_text(text)
    return f"{safe_text(text[:limit])}... ({len(text):,} characters; --full shows all)"


def trees_of(view: RunView, problem: ProblemView, filter: str) -> list[StoredTree]:
    """Return the searches of a problem in order, or else its prompt with its samples.

    Args:
        view: The run.
        problem: The problem.
        filter: The filter that reads the answers of samples.
    """
    trees = [tree for tree in view.trees if tree.problem_id == problem.id]
    trees.sort(key=lambda tree: tree.repeat)
    return trees or [prompt_tree(view.tree, problem, filter)]


def trees_document(trees: Sequence[StoredTree], problem_id: str) -> dict[str, Any]:
    """Return trees of a problem as JSON values: the first, and all if there are several."""
    documents = [
        {
            "problem": problem_id,
            "index": tree.repeat,
            "method": tree.method,
            "solved": tree.solved,
            "answer": tree.answer,
            "best": tree.best,
            "nodes": [dict(node) for node in tree.nodes],
        }
        for tree in trees
    ]
    return documents[0] if len(trees) == 1 else {**documents[0], "searches": documents}


def tree_title(tree: StoredTree, name: str) -> str:
    """Return the line above a drawn tree: its size and its answer."""
    outcome = {True: ", solved", False: ", not solved", None: ""}[tree.solved]
    if tree.solved is False:
        wrong = "the best path is wrong" if tree.marked is not None else "no finished solution"
        outcome += f" ({wrong})"
    if tree.error:
        outcome = f", failed: {tree.error}"
    answer = "" if tree.answer is None else f", answer {tree.answer}"
    return safe_text(f"{name}, {tree.method}: {len(tree.nodes):,} nodes{outcome}{answer}")


def tree_legend(tree: StoredTree) -> str:
    """Return a line that explains the marks of a drawn tree; "" if it has none."""
    is_search = tree.method != SAMPLES
    path = "on the best path" if is_search else "the first sample of the winning answer"
    score = "the value of a node, higher is better" if is_search else "1 if right, 0 if wrong"
    marks = {
        f"* {path}": tree.marked is not None,
        f"score: {score}": any(node.get("score") is not None for node in tree.nodes),
        "logprob: sum over the tokens of a node": any(
            node.get("n_tokens") and node.get("logprob") is not None for node in tree.nodes
        ),
        "visits: how many values count for a node": any(node.get("visits") for node in tree.nodes),
        "restart: the search began again at the root": any(
            node.get("restart") for node in tree.nodes
        ),
        "pruned: not continued": any(node.get("pruned") for node in tree.nodes),
        "dropped: by the search function": any(
            node.get("dropped") and not node.get("pruned") for node in tree.nodes
        ),
    }
    return "; ".join(mark for mark, is_present in marks.items() if is_present)


SAMPLES: Final = "samples"
"""The method of a tree of samples."""


def prompt_tree(root: Node | None, problem: ProblemView, filter: str) -> StoredTree:
    """Return a problem's prompt and samples as a tree like that of a search.

    The samples are leaves below the prompt. The best node is the first sample with the most
    frequent answer. The score of a sample is 1 if it is correct, 0 if it is wrong, and None if it
    is not scored.

    Args:
        root: The declared prompts; if None, the problem's question replaces the prompt.
        problem: The problem.
        filter: The filter that reads the answers.
    """
    nodes: list[dict[str, Any]] = []

    def add(text: str, leaf: bool, **more: Any) -> None:
        parent = None if not nodes else prompt_end if leaf else nodes[-1]["id"]
        depth = 0 if parent is None else nodes[parent]["depth"] + 1
        nodes.append(
            {
                "id": len(nodes),
                "parent_id": parent,
                "depth": depth,
                "text": text,
                "score": None,
                "logprob": None,
                "n_tokens": 0,
                "leaf": leaf,
                "pruned": False,
                "finish_reason": "given",
                **more,
            }
        )

    prompt_end = 0
    prompts = prompts_of(root) if root is not None else []
    path = next((prompt.path for prompt in prompts if prompt.id == problem.id), ())
    for node in path:
        if node.content:
            add(content_text(node), leaf=False)
    if not nodes:
        add(problem.question or problem.id, leaf=False)
    prompt_end = nodes[-1]["id"]
    verdicts = [sample.verdict(filter) for sample in problem.samples]
    vote = majority_vote(verdict.answer for verdict in verdicts if verdict is not None)
    best: int | None = None
    for sample, verdict in zip(problem.samples, verdicts, strict=True):
        if best is None and verdict is not None and verdict.answer == vote.answer is not None:
            best = len(nodes)
        add(
            sample.text,
            leaf=True,
            score=None if verdict is None else float(verdict.correct),
            logprob=sample.logprob,
            n_tokens=sample.num_tokens,
            finish_reason=sample.finish_reason,
        )
    solved = None if best is None else nodes[best]["score"] == 1.0
    return StoredTree(problem.id, SAMPLES, solved, vote.answer, best, tuple(nodes))


def content_text(node: Node) -> str:
    """Return a node's content as text for people."""
    if isinstance(node.content, str):
        return node.content
    if node.has_messages:
        turns = cast("Sequence[Mapping[str, Any]]", node.content)
        return "\n".join(f"{turn['role']}: {describe_content(turn['content'])}" for turn in turns)
    return f"{len(node.content):,} token ids: {' '.join(map(str, node.content[:50]))}"
