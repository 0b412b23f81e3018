"""What a run is, and how runs differ, is said wherever runs are shown or compared."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_cases import Command
from report_cases import edit_run, make_run, make_search_run

from treegen import open_run
from treegen.evals.problem import readable_reference
from treegen.report.compare import compare_runs
from treegen.report.html_page import write_page
from treegen.report.load import load_run
from treegen.report.run_settings import (
    KeySettings,
    describe_random_numbers,
    describe_view,
    differing_columns,
    differing_settings,
    short_model_name,
)
from treegen.report.view import RunView

SYSTEM = "Solve the problem step by step, and end with the answer as a number."


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two runs of the same problems with other settings."""
    folder = tmp_path_factory.mktemp("runs")
    a = make_run(folder / "a", num_problems=6, num_samples=4)
    b = make_run(
        folder / "b",
        num_problems=6,
        num_samples=4,
        temperature=1.0,
        seed=0,
        apply_chat_template=True,
        system_instruction=SYSTEM,
        data=str(folder / "a-data.jsonl"),
    )
    return a, b


def test_a_run_is_its_task_its_model_and_key_settings(runs: tuple[Path, Path]) -> None:
    a, b = map(load_run, runs)
    assert describe_view(a) == ("gsm8k with made-up: n 4, temperature 0.7, max_tokens 256, 8-shot")
    assert describe_view(b) == (
        "gsm8k with made-up: n 4, temperature 1, max_tokens 256, 8-shot, chat template, "
        "system text 'Solve the problem step by step, and end ...'"
    )
    assert describe_view(b, short=True) == "gsm8k with made-up"


def test_a_comparison_says_in_what_the_runs_differ(
    runs: tuple[Path, Path], treegen: Command
) -> None:
    a, b = map(load_run, runs)
    comparison = compare_runs(a, b)
    lines = str(comparison).splitlines()
    assert lines[0] == f"A: a, {describe_view(a)}" and lines[1] == f"B: b, {describe_view(b)}"
    differ = (
        "differ in: temperature 0.7 / 1, apply_chat_template False / True, "
        "system_instruction none / 'Solve the problem step by step, and end ...', "
        "fewshot_as_multiturn False / True"
    )
    assert lines[2] == differ
    assert lines[3] == "4 settings differ; the test cannot separate their effects"
    assert "differ in: no setting that affects samples\n" in str(compare_runs(a, a))
    assert "settings differ" not in str(compare_runs(a, a))
    assert differ.replace("'", "&#x27;") in comparison._repr_html_()
    done = treegen("compare", *runs, "--no-plots")
    assert differ in done.out and done.document["differ_in"] == list(comparison.differ_in)
    assert differ in str(open_run(runs[0]).compare(runs[1]))


def test_arguments_that_follow_from_the_method_are_no_difference() -> None:
    def settings(method: str, **arguments: object) -> KeySettings:
        return KeySettings("demo", {"method": method, "arguments": arguments})

    one, other = settings("mcts", batch=1), settings("mcts", batch=8)
    assert differing_settings(one, other) == ("arguments.batch 1 / 8",)
    methods = ("method 'sample' / 'mcts'",)
    assert differing_settings(settings("sample"), other) == methods
    shared = settings("ab-mcts", batch=1, rule="a")
    assert set(differing_settings(shared, other)) == {
        "method 'ab-mcts' / 'mcts'",
        "arguments.batch 1 / 8",
    }


def test_a_comparison_says_whether_the_runs_share_random_numbers(
    runs: tuple[Path, Path], treegen: Command
) -> None:
    a, b = map(load_run, runs)
    same = "random numbers: the same in both runs (seed 0), so similar runs differ by less noise"
    assert same in str(compare_runs(a, b)).splitlines()
    texts = tuple(
        replace(p, samples=tuple(replace(s, text=f"{s.text}.") for s in p.samples))
        for p in b.problems
    )
    without = same.partition(", so")[0]
    assert without in str(compare_runs(a, replace(b, problems=texts))).splitlines()

    def with_sampling(view: RunView, **changes: object) -> RunView:
        sampling = {**view.info.identity["sampling"], **changes}
        return replace(
            view, info=replace(view.info, identity={**view.info.identity, "sampling": sampling})
        )

    other = with_sampling(b, seed=5)
    assert describe_random_numbers(a, other, is_similar=True) == "independent (seed 0 / 5)"
    greedy = with_sampling(b, temperature=0.0)
    assert describe_random_numbers(a, greedy, is_similar=True) == ""
    out = treegen("compare", *runs, "--no-plots").out
    assert same in out and "--html FILE.html" in out


def test_a_comparison_counts_equal_samples_and_shows_one_filter(
    runs: tuple[Path, Path], treegen: Command
) -> None:
    a, b = map(load_run, runs)
    num = sum(len(problem.samples) for problem in a.problems)
    assert f"samples: all {num} have the same text in both runs" in str(compare_runs(a, a))
    first, *others = b.problems
    changed = replace(first.samples[0], text="different")
    problem = replace(first, samples=(changed, *first.samples[1:]))
    comparison = compare_runs(b, replace(b, problems=(problem, *others)))
    assert (comparison.num_equal, comparison.num_paired) == (num - 1, num)
    assert f"samples: {num - 1} of {num} have the same text" in comparison._repr_html_()
    hidden = "other filters: strict-match, flexible-extract; "
    assert f"{hidden}listing(all_filters=True) has them" in str(comparison)
    assert "|flexible-extract|" not in str(comparison)
    out = treegen("compare", *runs, "--no-plots").out
    assert f"{hidden}--all-filters shows them" in out and "|flexible-extract|" not in out
    every = treegen("compare", *runs, "--no-plots", "--all-filters").out
    assert hidden not in every and "|flexible-extract|" in every


def test_power_has_the_size_of_the_run(runs: tuple[Path, Path], treegen: Command) -> None:
    done = treegen("power", "--run", runs[0])
    num = len(load_run(runs[0]).problems)
    assert f"; {num} problems\n" in done.out and f"|Power with {num}|" in done.out
    assert [row["num_samples"] for row in done.document["rows"]] == [1, 4, 16, 64]
    done = treegen("power", "--run", runs[0], "-n", "2,8", "--n-problems", 60)
    assert [row["num_samples"] for row in done.document["rows"]] == [2, 8]
    assert done.document["num_problems"] == 60


@pytest.mark.parametrize(
    ("group", "name", "value", "message"),
    [
        ("", "num_samples", "x", "num_samples must be int, got 'x'"),
        ("", "task", "x", "task must be dict, got 'x'"),
        ("", "data", None, "data must be dict, got None"),
        ("task", "name", [1], "name must be str"),
        ("sampling", "top_k", "x", "top_k must be int or null"),
        ("sampling", "stop", [1], "an element of stop must be str, got 1"),
        ("prompt", "system_instruction", {}, "system_instruction must be str or null"),
        ("search", "method", {}, "method must be str"),
        ("budget", "tokens", [], "tokens must be int or null"),
    ],
)
def test_settings_of_a_wrong_type_are_an_error(
    group: str, name: str, value: object, message: str, tmp_path: Path, treegen: Command
) -> None:
    make = make_search_run if group in ("search", "budget") else make_run
    a, b = (make(tmp_path / name, num_problems=2) for name in "ab")

    def edit(content: dict[str, Any]) -> None:
        identity = content["settings"]["identity"]
        (identity[group] if group else identity)[name] = value

    edit_run(b, edit)
    for words in (["show", b], ["compare", a, b, "--no-plots"], ["export", b, "--to", "lm-eval"]):
        done = treegen(*words)
        assert done.code == 2 and f"{b}/run.json: {message}" in done.error


@pytest.mark.usefixtures("undrawn")
def test_the_page_of_runs_has_a_column_for_each_differing_setting(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    views = list(map(load_run, runs))
    columns = differing_columns([KeySettings.of(view) for view in views])
    assert columns["temperature"] == ["0.7", "1"]
    write_page(views, tmp_path / "page.html", plots=False)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)</th>', page)
    assert heads[:6] == [
        "Run",
        "Task",
        "Model",
        "temperature",
        "apply_chat_template",
        "system_instruction",
    ]
    assert all(describe_view(view).replace("'", "&#39;") in page for view in views)
    write_page(views, tmp_path / "both.html", plots=False, comparison=compare_runs(*views))
    both = (tmp_path / "both.html").read_text("utf-8")
    assert "differ in: temperature 0.7 / 1" in both
    link = '<a href="#samples-side-by-side">'
    assert link in both and 'id="samples-side-by-side"' in both and link not in page


@pytest.mark.usefixtures("undrawn")
def test_a_page_has_contents_and_its_samples_before_its_plots(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    write_page([load_run(runs[0])], tmp_path / "page.html", plots=False)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    contents = page[page.index('class="contents"') :]
    links = re.findall(r'<a href="#(run-1-[\w-]+)">', contents[: contents.index("</nav>")])
    places = [page.index(f'id="{link}"') for link in links]
    assert places == sorted(places) and len(links) >= 5
    assert links.index("run-1-drawn") < links.index("run-1-plots")
    assert links.index("run-1-metrics") == 0 and links[-1] == "run-1-settings"
    for words in ("maj@k: the probability", "pass@k: the probability", "95% interval: where"):
        assert words in page[page.index('id="run-1-metrics"') :]


def test_models_and_references_have_short_forms() -> None:
    names = ("Qwen/Qwen3-0.6B", "/data/models/llama", "./llama", "a/b/c", "demo")
    assert list(map(short_model_name, names)) == ["Qwen/Qwen3-0.6B", "llama", "llama", "c", "demo"]
    assert readable_reference('["36"]') == "36"
    assert readable_reference('["36", "thirty-six"]') == "36 or thirty-six"
    for plain in ("36", "[1, 2]", "[", "[]", "an [answer]"):
        assert readable_reference(plain) == plain


def test_references_in_frames_and_on_pages_are_the_answers(
    runs: tuple[Path, Path], treegen: Command
) -> None:
    pytest.importorskip("pandas")
    assert open_run(runs[0]).problems()["reference"].tolist() == [str(i) for i in range(6)]


def test_only_methods_that_draw_whole_solutions_have_n() -> None:
    def line(method: str) -> str:
        choices = {"method": method, "num_samples": 40, "temperature": 0.7}
        return KeySettings.of_choices(choices, {}).describe("countdown")

    assert line("tot-bfs") == "countdown: tot-bfs, temperature 0.7"
    assert line("best-of-n") == "countdown: best-of-n, n 40, temperature 0.7"
    assert "n 40" in line("mine.py:two")  # a function of the user's own may read it
    choices = {"task": "countdown", "method": "mine.py:two", "num_samples": 40}
    assert KeySettings.of_choices(choices, {}).describe("countdown") == "countdown: mine.py:two"
    choices["num_samples"] = 7  # the user has chosen it
    assert "n 7" in KeySettings.of_choices(choices, {}).describe("countdown")
    choices["task"] = "mmlu"  # it cannot be searched, in this version
    assert "n 7" in KeySettings.of_choices(choices, {}).describe("mmlu")


def test_settings_that_only_one_method_reads_follow_from_the_methods() -> None:
    def settings(method: str, task: str = "countdown", **choices: Any) -> KeySettings:
        every = {"task": task, "num_samples": 40, "width": 3, "depth": 3, "expand": 4}
        return KeySettings.of_choices({**every, "method": method, **choices}, {})

    first = settings("best-of-n")
    assert differing_settings(first, settings("beam", width=5)) == ("method 'best-of-n' / 'beam'",)
    beam = settings("beam", width=5, iterations=9)
    assert differing_settings(beam, settings("tot-bfs", exploration=2)) == (
        "method 'beam' / 'tot-bfs'",
        "width 5 / 3",
    )
    # Of one method, all settings are compared.
    assert differing_settings(first, settings("best-of-n", num_samples=4)) == (
        "num_samples 40 / 4",
    )
    own = settings("mine.py:two", "mine.py:Task", width=5)
    assert "n 40" not in own.describe("mine")
    assert differing_settings(own, settings("beam")) == ("method 'mine.py:two' / 'beam'",)
    again = settings("mine.py:two", "mine.py:Task", width=5, num_samples=4)
    assert differing_settings(own, again) == ("num_samples 40 / 4",)


def test_a_column_compares_each_pair_of_runs() -> None:
    def settings(**choices: Any) -> KeySettings:
        return KeySettings.of_choices({"model": "m", **choices}, {})

    beams = [settings(method="beam", width=width) for width in (4, 8)]
    mcts = settings(method="mcts", width=1)  # does not read the width
    assert differing_columns([*beams, mcts])["width"] == ["4", "8", ""]
    assert differing_columns([mcts, *beams])["width"] == ["", "4", "8"]
    log = KeySettings("m", {}, recorded=frozenset({"num_samples"}))
    drawn = [settings(temperature=temperature) for temperature in (0.7, 1.0)]
    assert differing_columns([log, *drawn])["temperature"] == ["not recorded", "0.7", "1.0"]
