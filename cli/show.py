"""`treegen show`: a run in the terminal, as a whole, by problem, or as a tree."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from treegen.cli.options import CONTEXT, QUIET

if TYPE_CHECKING:
    from treegen.report.trees import StoredTree
    from treegen.report.view import ProblemView, RunView

_LISTED: Final = 20
_FOLDED: Final = 120  # characters of a thinking that are shown
_WIDTH: Final = 200


@click.command("show", context_settings=CONTEXT)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--problem", "-p", metavar="ID", help="One problem: its samples and their votes.")
@click.option("--tree", "-t", metavar="ID", help="One problem as a tree: its search, or its "
              "prompt with the samples below.")  # fmt: skip
@click.option("--as", "written_as", type=click.Choice(("dot", "mermaid")), metavar="FORMAT",
              help="With --tree: write it for Graphviz (dot) or mermaid.")  # fmt: skip
@click.option("--filter", "filter_name", metavar="NAME", help="Read answers by this filter.")
@click.option("--full", is_flag=True, help="Whole texts, and every problem in the list.")
@click.option("--data", metavar="PATH", help="Where the problems are now, if not where they were.")
@QUIET
def command(
    run: Path,
    problem: str | None,
    tree: str | None,
    written_as: str | None,
    filter_name: str | None,
    full: bool,
    data: str | None,
    quiet: bool,
) -> None:
    """Show what the directory RUN holds: metrics and problems, one problem, or one tree."""
    from treegen.errors import InputError

    if problem is not None and tree is not None:
        raise InputError("give --problem or --tree, not both")
    if written_as is not None and tree is None:
        raise InputError("--as is of a tree; give --tree ID with it")
    from treegen.cli.render import json_line, notice
    from treegen.report.load import load_run

    view = load_run(run, data=data)
    for line in view.notices if not quiet else ():
        notice(line)
    filter = filter_of(view, filter_name)
    wanted = problem if problem is not None else tree
    found = _problem(view, wanted) if wanted is not None else None
    if found is None:
        document = _show_run(view, filter, full=full, quiet=quiet)
    elif tree is None:
        document = _show_problem(view, found, filter, full=full, quiet=quiet)
    elif written_as is not None:
        _write_graph(view, found, filter, written_as)
        return
    else:
        document = _show_tree(view, found, filter, full=full, quiet=quiet)
    json_line({"run": str(run), **document})


def filter_of(view: "RunView", name: str | None) -> str:
    """Return the filter of a name that a user gave, by default the headline's; "" if none is."""
    from treegen.errors import InputError

    if name is not None and name not in view.filters:
        known = ", ".join(view.filters) or "none"
        raise InputError(f"the run has no verdicts by the filter {name!r}; it has: {known}")
    return name or (view.filters[0] if view.filters else "")


def _problem(view: "RunView", wanted: str) -> "ProblemView":
    from treegen.common.spelling import did_you_mean
    from treegen.errors import InputError

    for problem in view.problems:
        if problem.id == wanted:
            return problem
    hint = did_you_mean(wanted, [problem.id for problem in view.problems])
    raise InputError(f"the run has no problem {wanted!r}{hint}")


def _show_run(view: "RunView", filter: str, *, full: bool, quiet: bool) -> dict[str, Any]:
    from treegen.cli.render import echo
    from treegen.cli.tables import markdown, report_tables
    from treegen.common.formats import safe_text
    from treegen.report.curves import vote_shares

    shares = vote_shares(view.verdicts(filter)) if filter else []
    document = {
        "task": view.task,
        "planned": view.info.planned,
        "done": view.num_done,
        "report": view.report.to_json() if view.report else None,
        "problems": [
            {"id": s.problem_id, "right": s.right, "tied": s.tied, "won": s.won} for s in shares
        ],
        "trees": [
            {"id": t.problem_id, "index": t.repeat, "solved": t.solved, "answer": t.answer}
            for t in view.trees
        ],
    }
    if quiet:
        return document
    done = f"{view.num_done:,} of {view.info.planned:,} {view.unit}"
    echo(safe_text(f"{view.task}: {done}, {view.path}"))
    echo("")
    results = {"usage": view.usage, "done": view.num_done, "planned": view.info.planned}
    report_tables(results, view.report, unit=view.unit)
    if shares and not view.searched:
        rows = [
            [s.problem_id, f"{s.right:.3f}", f"{s.invalid:.3f}", _vote(s.won, s.tied)]
            for s in (shares if full else shares[:_LISTED])
        ]
        echo("\n" + markdown(["Problem", "Right", "Invalid", "Vote"], rows, right=(1, 2)))
        if len(rows) < len(shares):
            echo(f"... and {len(shares) - len(rows):,} more, harder ones (--full)")
        echo("one problem: --problem ID; its tree: --tree ID\n")
    if view.trees:
        echo(_searches(view.trees if full else view.trees[:_LISTED]))
        if len(view.trees) > _LISTED and not full:
            echo(f"... and {len(view.trees) - _LISTED:,} more (--full)")
        echo("one tree: --tree ID\n")
    return document


def _vote(won: bool, tied: bool) -> str:
    return {(True, False): "won", (True, True): "tied for first", (False, True): "lost, a tie"}.get(
        (won, tied), "lost"
    )


def _searches(trees: "tuple[StoredTree, ...]") -> str:
    from treegen.cli.tables import markdown

    solved = {True: "yes", False: "no", None: ""}
    several = any(tree.repeat for tree in trees)
    rows = [
        [_name(t) if several else t.problem_id, t.method, solved[t.solved], t.answer or "",
         f"{len(t.nodes):,}", f"{t.num_tokens:,}"]
        for t in trees
    ]  # fmt: skip
    return markdown(
        ["Problem", "Search", "Solved", "Answer", "Nodes", "Tokens"], rows, right=(4, 5)
    )


def _name(tree: "StoredTree") -> str:
    """The problem, and which search of it, as pages name samples."""
    return f"{tree.problem_id} #{tree.repeat}"


def _show_problem(
    view: "RunView", problem: "ProblemView", filter: str, *, full: bool, quiet: bool
) -> dict[str, Any]:
    from treegen.cli.render import echo
    from treegen.cli.tables import markdown
    from treegen.common.formats import safe_text
    from treegen.evals.statistics.votes import majority_vote
    from treegen.evals.thinking import stored
    from treegen.report.curves import fate

    answers = {s.index: _answer(s.verdicts, filter) for s in problem.samples}
    vote = majority_vote(answers.values())
    document = {
        "problem": problem.id,
        "question": problem.question,
        "answer": problem.answer,
        "vote": {"answer": vote.answer, "votes": vote.votes, "tied": list(vote.tied)},
        "samples": [
            {
                "index": s.index,
                "answer": answers[s.index],
                "fate": fate(s, filter),
                "finish_reason": s.finish_reason,
                "num_tokens": s.num_tokens,
                "logprob": s.logprob,
                "text": s.text,
                **({} if s.thinking is None else {"thinking": stored(s.thinking)}),
            }
            for s in problem.samples
        ],
    }
    if quiet:
        return document
    limit = None if full else 2000
    echo(safe_text(f"problem {problem.id}, prompt of {problem.prompt_tokens:,} tokens\n"))
    for title, text in (("question", problem.question), ("reference", problem.answer)):
        if text:
            echo(f"{title}: {_clip(text, limit)}\n")
    if vote.answer is not None:
        votes: dict[str, list[int]] = {}
        for index, answer in answers.items():
            votes.setdefault("(none)" if answer is None else answer, []).append(index)
        ranked = sorted(votes.items(), key=lambda item: -len(item[1]))
        rows = [
            [_clip(answer, 60), str(len(indices)), "*" if answer in vote.tied else "",
             fate(problem.samples[list(answers).index(indices[0])], filter)]
            for answer, indices in ranked
        ]  # fmt: skip
        echo(markdown([f"Answer by {filter}", "Votes", "Most", ""], rows, right=(1,)) + "\n")
    for s in problem.samples:
        what = "search" if view.searched else f"sample {s.index}"
        logprob = "" if s.logprob is None else f", logprob {s.logprob:.2f}"
        echo(
            safe_text(
                f"--- {what}: {fate(s, filter)}, {s.num_tokens:,} tokens{logprob}, "
                f"ended by {s.ended}"
            )
        )
        thinking, answer = s.parts
        if s.thinking is not None:
            head = f"[thinking, {s.thinking.num_tokens:,} tokens]"
            echo(f"{head} {_clip(thinking, limit if full else _FOLDED)}\n[answer]")
        echo(_clip(answer, limit) + "\n")
    return document


def _answer(verdicts: Any, filter: str) -> str | None:
    return verdicts[filter].answer if verdicts is not None and filter in verdicts else None


def _clip(text: str, limit: int | None) -> str:
    from treegen.common.formats import safe_text

    if limit is None or len(text) <= limit:
        return safe_text(text)
    return f"{safe_text(text[:limit])}... ({len(text):,} characters; --full shows all)"


def _trees_of(view: "RunView", problem: "ProblemView", filter: str) -> "list[StoredTree]":
    """Return the searches of a problem in order, or else its prompt with its samples."""
    from treegen.report.prompt_tree import prompt_tree

    found = [tree for tree in view.trees if tree.problem_id == problem.id]
    found.sort(key=lambda tree: tree.repeat)
    return found or [prompt_tree(view.tree, problem, filter)]


def _write_graph(view: "RunView", problem: "ProblemView", filter: str, kind: str) -> None:
    """Print trees for another program, one after another, and nothing else."""
    from treegen.cli.render import echo
    from treegen.report.graphs import to_dot, to_mermaid

    for tree in _trees_of(view, problem, filter):
        echo((to_dot(tree) if kind == "dot" else to_mermaid(tree)).removesuffix("\n"))


def _show_tree(
    view: "RunView", problem: "ProblemView", filter: str, *, full: bool, quiet: bool
) -> dict[str, Any]:
    from treegen.cli.render import echo
    from treegen.common.formats import safe_text
    from treegen.search.tree.draw import draw_tree

    trees = _trees_of(view, problem, filter)
    for tree in trees if not quiet else ():
        from rich.console import Console

        told = {True: ", solved", False: ", not solved", None: ""}[tree.solved]
        answer = "" if tree.answer is None else f", answer {tree.answer}"
        name = _name(tree) if len(trees) > 1 else problem.id
        echo(safe_text(f"{name}, {tree.method}: {len(tree.nodes):,} nodes{told}{answer}"))
        # A file or a pipe has no width, so a wide one is taken.
        width = None if sys.stdout.isatty() else _WIDTH
        drawn = draw_tree(tree.nodes, tree.best, full=full)
        Console(file=sys.stdout, width=width, highlight=False).print(drawn)
        echo("")
    documents = [
        {
            "problem": problem.id,
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
