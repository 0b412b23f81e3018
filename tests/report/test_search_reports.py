"""What searches came to for what they cost, and their trees for other programs."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from report_cases import HOSTILE, make_run, make_search_run

from treegen.evals.progress.run_progress import AccuracyCounter
from treegen.evals.search.job import load_search_job
from treegen.evals.statistics.estimators import estimate
from treegen.report.compare import CLUSTERED, METHOD, compare_runs
from treegen.report.load import load_run
from treegen.report.plots.searches import (
    cost_listing,
    methods_of,
    methods_plot,
    solved_plot,
    solved_share,
)
from treegen.report.run_document import problem_text, problems_text
from treegen.report.view import RunView, StoredTree


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunView]:
    folder = tmp_path_factory.mktemp("runs")
    return [load_run(make_search_run(folder / f"run-{seed}", seed=seed)) for seed in range(3)]


def tree(problem: str, solved: bool | None, tokens: int, index: int = 0) -> StoredTree:
    usage = {"tokens_decoded": tokens, "calls": 2}
    return StoredTree(problem, "beam", solved, None, None, (), usage=usage, repeat=index)


def test_solved_share_equals_that_of_the_report(runs: list[RunView]) -> None:
    for run in runs:
        found = solved_share(run.trees)
        assert run.report is not None and found is not None
        row = run.report.metrics[0]
        assert (found.value, found.low, found.high) == (row.value, row.low, row.high)


def test_several_searches_of_a_problem_count_with_their_mean() -> None:
    trees = [tree("a", True, 10), tree("a", False, 10, 1), tree("b", True, 50), tree("c", None, 1)]
    assert solved_share(trees) == estimate([0.5, 1.0])
    assert solved_share(trees, 20) == estimate([0.5, 0.0])
    assert solved_share([tree("c", None, 1)]) is None


def test_a_table_says_what_runs_cost(runs: list[RunView], tmp_path: Path) -> None:
    found = cost_listing(runs)
    assert found is not None and len(found.rows) == 3
    for run, row in zip(runs, found.rows, strict=True):
        cells = dict(zip(found.head, row, strict=True))
        tokens = [tree.num_tokens for tree in run.trees]
        solved = sum(bool(tree.solved) for tree in run.trees)
        assert (
            cells["Solved"] == f"{solved}/12" and cells["Budget"] == "2,000\N{NO-BREAK SPACE}tokens"
        )
        assert cells["Tokens"] == f"{sum(tokens) / 12:,.0f}"
        assert cells["Max"] == f"{max(tokens)}"
        assert cells["Tokens per solution"] == f"{sum(tokens) / solved:,.0f}"
        assert cells["Prefilled"] == "90.0" and cells["Seconds"] == ""
    none = replace(runs[0], trees=(tree("a", False, 3),))
    listing = cost_listing([none])
    assert listing is not None and "n/a" in listing.rows[0]
    assert cost_listing([load_run(make_run(tmp_path / "run", num_problems=2))]) is None


def test_show_and_compare_have_one_name_for_the_share_that_is_solved(runs: list[RunView]) -> None:
    (row,) = compare_runs(runs[0], runs[1]).differences
    assert runs[0].report is not None
    assert row.metric == runs[0].report.metrics[0].metric == "solved"
    assert row.p_holm is None, "a single p-value needs no adjustment"


def test_searches_are_listed_in_a_table_of_their_own(runs: list[RunView]) -> None:
    assert problems_text(runs[0], (), full=False).startswith("\n|Problem")
    shown = problem_text(runs[0], runs[0].problems[0], "solved", full=False)
    assert shown.startswith(f"problem {runs[0].problems[0].id}\n"), "the prompt is not measured"
    answered = next(p for p in runs[0].problems if (p.samples[0].verdicts or {})["solved"].answer)
    shown = problem_text(runs[0], answered, "solved", full=False)
    assert "|Searches|" in shown and "Votes" not in shown


def test_curves_over_tokens(runs: list[RunView]) -> None:
    plot = solved_plot(runs[0])
    assert plot is not None and plot.render().svg.startswith(b"<svg")
    assert solved_plot(replace(runs[0], trees=(tree("a", False, 3),))) is None
    methods = methods_plot(runs)
    assert methods is not None and methods.description.count(" with ") == 3
    assert methods.render().svg.startswith(b"<svg")
    assert methods_plot(runs[:1]) is None


def test_labels_distinguish_runs_of_one_method(runs: list[RunView]) -> None:
    def like(run: RunView, arguments: dict[str, Any], budget: int, seed: int = 0) -> RunView:
        identity = {
            "search": {"method": "ab-mcts", "width": 3, "arguments": arguments},
            "budget": {"tokens": budget},
            "draw": {"seed": seed, "top_p": 1},
        }
        return replace(run, info=replace(run.info, identity=identity))

    m, a = {"rule": "m", "batch": 4}, {"rule": "a", "batch": 4}
    relabelled = [like(runs[0], m, 250), like(runs[1], m, 500), like(runs[2], a, 250)]
    assert methods_of(relabelled) == ["ab-mcts rule=m", "ab-mcts rule=m", "ab-mcts rule=a"]
    assert methods_of(relabelled[:2]) == ["ab-mcts"] * 2
    assert methods_of([*relabelled[:2], runs[0]])[:2] == ["ab-mcts"] * 2
    plot = methods_plot(relabelled)
    assert (
        plot is not None
        and plot.description.count("rule=") == 2
        and plot.description.count(" with ") == 3
    )
    seeds = [relabelled[0], like(runs[1], m, 250, seed=1)]
    assert methods_of(seeds) == ["ab-mcts seed=0", "ab-mcts seed=1"]


def test_hostile_text_stays_in_its_label() -> None:
    def node(id: int, parent: int | None, text: str) -> dict[str, Any]:
        return {
            "id": id,
            "parent_id": parent,
            "text": text,
            "score": 0.5,
            "n_tokens": 3,
            "logprob": -1.0,
            "leaf": parent is not None,
            "pruned": id == 2,
            "finish_reason": "stop",
        }

    texts = [*HOSTILE[:-1], 'a "quoted" \\" one\n]; x', "end\nsubgraph %%{init}%%", ""]
    nodes = [node(0, None, "root"), *(node(i, 0, text) for i, text in enumerate(texts, 1))]
    found = StoredTree('p"0\\', "beam", True, None, 3, tuple(nodes))
    label = r'"(?:[^"\\]|\\.)*"'
    dot = found.to_dot().splitlines()
    assert dot[0] == r'digraph "p\"0\\" {' and dot[-1] == "}"
    for line in dot[4:-1]:
        assert re.fullmatch(
            rf"  n\d+(?: -> n\d+)?(?: \[[^\"]*(?:label={label})?[^\"]*\])?;|"
            rf"  n\d+ \[label={label}(?:, style=\"rounded,dashed\")?"
            r"(?:, penwidth=3)?\];",
            line,
        ), line
    mermaid = found.to_mermaid().splitlines()
    assert mermaid[0] == "flowchart LR" and "  class n2 pruned" in mermaid
    for line in mermaid[1 : 1 + len(nodes)]:
        assert re.fullmatch(r'  n\d+\["(?:[^"\[\]{}()<>`%;#&|]|#\d+;|<br>)*"\]', line), line
    assert "  n0 ==> n3" in mermaid and "  n0 --> n1" in mermaid
    for text in (*dot, *mermaid):
        assert text.isprintable()


def test_the_prompt_of_a_problem_is_a_graph_too(treegen: Command, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=3)
    done = treegen("show", run, "--tree", "p1", "--as", "mermaid")
    assert done.code == 0 and done.out.startswith("flowchart LR\n  n0[")
    assert done.out.count(" --> ") + done.out.count(" ==> ") >= 3


def test_groups_of_problems_are_clusters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_grouped(settings: Any) -> Any:
        job = load_search_job(settings)
        problems = [replace(p, group=f"g{i // 4}") for i, p in enumerate(job.data.problems)]
        return replace(job, data=replace(job.data, problems=tuple(problems)))

    monkeypatch.setattr("treegen.evals.search.job.load_search_job", load_grouped)
    monkeypatch.setattr("treegen.evals.identity.check_same_task", lambda *_: None)
    view = load_run(make_search_run(tmp_path / "run"))
    assert not view.notices and view.report is not None
    solved = [float(bool(tree.solved)) for tree in view.trees]
    clustered = estimate(solved, [i // 4 for i in range(12)])
    assert clustered.low != estimate(solved).low
    row = view.report.metrics[0]
    counter = AccuracyCounter(view.problems)
    for tree in view.trees:
        counter.count(tree.problem_id, bool(tree.solved))
    assert counter.estimate() == clustered
    unfinished = counter.estimate(2)
    wrong = estimate([*solved, 0.0, 0.0], [*(i // 4 for i in range(12)), "a", "b"])
    assert unfinished is not None and unfinished.low == wrong.low
    share = solved_share(view.trees, problems=view.problems)
    assert (row.low, row.high) == (clustered.low, clustered.high) and share == clustered
    alone = replace(view, problems=tuple(replace(p, group="") for p in view.problems))
    for a, b in ((view, view), (view, alone), (alone, view)):
        assert compare_runs(a, b).differences[0].method == CLUSTERED
    assert compare_runs(alone, alone).differences[0].method == METHOD


def test_several_searches_of_a_problem_are_numbered(runs: list[RunView]) -> None:
    problem = runs[0].problems[0]
    for view, name in ((runs[0], "search"), (replace(runs[0], num_samples=2), "search 0")):
        assert f"--- {name}: " in problem_text(view, problem, "solved", full=False)
