"""Working in a page: tables, links, keys, files, trees as pictures, and runs side by side."""

import csv
import io
import json
import re
from collections.abc import Callable
from itertools import combinations, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from browsing import Visit
from cli_cases import Command
from report_cases import HOSTILE, empty_pictures, make_run, make_search_run, make_trees

from treegen.common.formatting import safe_text
from treegen.report.compare import compare_runs
from treegen.report.curves import vote_shares
from treegen.report.html_page import write_page
from treegen.report.load import load_run
from treegen.runs.record_format import encode_record

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

Open = Callable[..., Visit]


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an ordinary run with search trees that note all that a search can note."""
    run = make_run(tmp_path_factory.mktemp("work") / "run", num_problems=30, num_samples=20)
    records = make_trees(run)
    for record in records:
        for node in record["nodes"][1:]:
            node |= {"visits": 1 + node["id"] % 7, "prior": 0.25, "scores": {"verifier": 0.5}}
            node |= {"data": {"<b>": [1, "\u202e"]}, "restart": 1}
            if node["pruned"]:
                node["pruned_because"] = "worth too little <i>"
    (run / "trees.jsonl").write_bytes(b"".join(map(encode_record, records)))
    write_page([load_run(run)], run / "report.html", plots=False)
    return run / "report.html"


def rows(table: "Locator") -> list[str]:
    """The first cells of the rows that are drawn."""
    return [row.locator("> *").first.inner_text() for row in table.locator(".row").all()]


def file_of(page: "Page", press: Callable[[], None]) -> tuple[str, str]:
    """The name and content of the file that a button gives."""
    with page.expect_download() as got:
        press()
    return got.value.suggested_filename, Path(got.value.path()).read_text(encoding="utf-8")


# The table of problems


def test_problems_are_sorted_and_filtered(page_path: Path, visit: Open) -> None:
    shares = {s.problem_id: s for s in vote_shares(load_run(page_path.parent).verdicts("numeric"))}
    page = (opened := visit(page_path)).page
    table = page.locator(".problems")
    accuracy = table.locator("[role=columnheader]", has_text="accuracy")
    accuracy.locator("button").click()
    assert accuracy.get_attribute("aria-sort") == "ascending"
    worst = min(shares.values(), key=lambda share: share.right)
    assert shares[rows(table)[0]].right == worst.right
    accuracy.locator("button").click()
    assert accuracy.get_attribute("aria-sort") == "descending"
    found = [shares[name].right for name in rows(table)]
    assert found == sorted(found, reverse=True) and len(found) > 5
    query = table.get_by_label("filter problems")
    query.fill("p1")
    names = [name for name in shares if "p1" in name]
    assert table.locator(".row-count").inner_text() == f"{len(names)} of 30 problems"
    table.get_by_label("exact match").check()
    assert rows(table) == ["p1"]
    table.get_by_label("exact match").uncheck()
    query.fill("accuracy<0.5 vote!=won")
    names = [name for name, s in shares.items() if s.right < 0.5 and (not s.won or s.tied)]
    assert names and table.locator(".row-count").inner_text() == f"{len(names)} of 30 problems"
    name, text = file_of(page, table.get_by_text("export CSV").click)
    assert name == "run-problems.csv"
    written = list(csv.DictReader(io.StringIO(text)))
    assert {row["problem"] for row in written} == set(names)
    assert all(float(row["accuracy"]) < 0.5 for row in written)
    opened.check()


def test_a_problem_leads_to_its_samples(page_path: Path, visit: Open) -> None:
    page = (opened := visit(page_path)).page
    opened.wait(lambda: opened.row_count() == "600 of 600 samples")
    row = page.locator(".problems .row", has_text="p12").first
    opened.click(row, lambda: opened.row_count() == "20 of 600 samples")
    opened.wait(lambda: page.locator(".samples h3").inner_text() == "p12 #0")
    opened.wait(lambda: opened.place() == "#problem=p12&sample=0")
    # Who types another name is not held to this one.
    page.get_by_label("problem", exact=True).fill("p1")
    opened.wait(lambda: opened.row_count() == "220 of 600 samples")


@pytest.mark.usefixtures("undrawn")
def test_problems_without_samples_or_verdicts_are_shown(tmp_path: Path, visit: Open) -> None:
    run = make_run(tmp_path / "run", num_problems=3, num_samples=2, done=[2, 1, 0])
    write_page([load_run(run)], run / "report.html", plots=False)
    page = (opened := visit(run / "report.html", at="#problem=p2")).page
    opened.wait(lambda: page.locator(".samples h3").count() == 1)
    assert page.locator(".samples .detail .text").all_text_contents() == ["What is 2 + 0?", "2"]
    (tmp_path / "run-data.jsonl").unlink()
    write_page([load_run(run)], run / "report.html", plots=False)
    page = (opened := visit(run / "report.html", at="#problem=p1")).page
    opened.wait(lambda: opened.row_count() == "1 of 3 samples")
    assert rows(page.locator(".problems")) == ["p0", "p1", "p2"]
    empty = make_run(tmp_path / "empty", num_problems=2, num_samples=2, done=[0, 0])
    write_page([load_run(empty), load_run(run)], tmp_path / "both.html", plots=False)
    page = (both := visit(tmp_path / "both.html", at="#problem=p1")).page
    both.wait(lambda: page.locator(".side").count() == 2)
    for visited in (opened, both):
        visited.check()


# Links


def test_an_address_leads_to_a_sample(page_path: Path, visit: Open) -> None:
    page = (opened := visit(page_path, at="#problem=p7&sample=5")).page
    heading = page.locator(".samples h3")
    opened.wait(lambda: heading.count() == 1 and heading.inner_text() == "p7 #5")
    assert page.locator(".problems [aria-selected=true]").inner_text().startswith("p7\n")
    page.evaluate("() => { location.hash = '#problem=p8&sample=2'; }")
    opened.wait(lambda: heading.inner_text() == "p8 #2")
    page.evaluate("() => { location.hash = '#problems=vote=lost'; }")
    lost = [s for s in vote_shares(load_run(page_path.parent).verdicts("numeric")) if not s.won]
    row_count = page.locator(".problems .row-count")
    opened.wait(lambda: row_count.inner_text() == f"{len(lost)} of 30 problems")
    page.evaluate("() => { location.hash = '#problem=nowhere'; }")
    opened.wait(lambda: opened.row_count() == "0 of 600 samples")
    opened.check()


def test_bars_and_points_lead_to_their_problems(page_path: Path, visit: Open) -> None:
    run = load_run(page_path.parent)
    shares = vote_shares(run.verdicts("numeric"))
    page = (opened := visit(page_path)).page
    figures = [
        page.locator(f"figure[data-plot={name}]")
        for name in ("votes", "share_accuracy", "difficulty_votes", "tokens_accuracy")
    ]
    assert all(figure.locator("a.plot-link").count() == 1 for figure in figures)
    link = figures[0].locator("a.plot-link")
    link.focus()
    names = []
    for _ in shares:
        names.append(link.get_attribute("title"))
        page.keyboard.press("ArrowRight")
    assert names == [share.problem_id for share in shares]
    # The pointer finds the bar that it is over: the third is a little more than two bars in.
    box, image = link.bounding_box(), figures[0].locator("img")
    assert box is not None
    image.scroll_into_view_if_needed()
    box = link.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 2.5 * box["width"], box["y"] + 5)
    opened.wait(lambda: link.get_attribute("title") == shares[2].problem_id)
    page.mouse.click(box["x"] + 2.5 * box["width"], box["y"] + 5)
    heading = page.locator(".samples h3")
    opened.wait(lambda: heading.count() and heading.inner_text() == f"{shares[2].problem_id} #0")  # type: ignore[arg-type,return-value]
    hard = page.locator("figure[data-plot=difficulty] a.plot-link")
    hard.focus()
    page.keyboard.press("ArrowRight")
    assert hard.get_attribute("title") == "problems with accuracy>=0.1 accuracy<0.2"
    page.keyboard.press("Enter")
    count = sum(0.1 <= share.right < 0.2 for share in shares)
    row_count = page.locator(".problems .row-count")
    opened.wait(lambda: row_count.inner_text() == f"{count} of 30 problems")
    opened.check()


def test_letter_keys_move_between_samples_and_problems(page_path: Path, visit: Open) -> None:
    page = (opened := visit(page_path, at="#problem=p3")).page
    heading = page.locator(".samples h3")
    for key, name in (
        ("j", "p3 #1"),
        ("j", "p3 #2"),
        ("k", "p3 #1"),
        ("n", "p4 #0"),
        ("p", "p3 #0"),
    ):
        opened.wait(lambda: heading.count() == 1)
        page.keyboard.press(key)
        opened.wait(lambda name=name: heading.inner_text() == name)  # type: ignore[misc]
    page.keyboard.press("/")
    page.keyboard.type("jjj")
    assert page.get_by_label("text in the sample").input_value() == "jjj"
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    assert page.locator(".keys").get_attribute("open") is not None


# A sample


@pytest.mark.usefixtures("undrawn")
def test_the_answer_is_marked_where_it_is_given(tmp_path: Path, visit: Open) -> None:
    texts = {
        "p0": (" 12 and 12. The answer is 0. Is 0 right?", "0", "The answer is "),
        "p1": (" So $1,234.00 it is", "1,234.00", " So $"),
        "p2": (" 3 5 and 15, then 5", "5", " 3 5 and 15, then "),
    }
    run = make_run(
        tmp_path / "run",
        num_problems=3,
        num_samples=1,
        draw=lambda rng, number, index: texts[f"p{number}"][0],
    )
    write_page([load_run(run)], run / "report.html", plots=False)
    page = (opened := visit(run / "report.html")).page
    for name, (text, marked, before) in texts.items():
        page.locator(".samples .row", has_text=f"{name} #0").click()
        opened.wait(lambda name=name: page.locator(".samples h3").inner_text() == f"{name} #0")  # type: ignore[misc]
        said = page.locator(".samples .said .text")
        assert said.text_content() == text
        assert said.locator("mark").inner_text() == marked, name
        head = said.evaluate("text => text.firstChild.textContent")
        assert head.endswith(before), name
    opened.check()


def test_an_answer_of_any_form_is_looked_for_in_any_text(page_path: Path, visit: Open) -> None:
    page = visit(page_path).page
    find = "([text, answer]) => answerSpan(text, answer)"
    blanks = " " * 150
    cases: list[tuple[str, str, list[int] | None]] = [
        ("x" + " " * 100_000 + "z", f"x{blanks}y", None),
        (f"x{blanks}y", "x y", [0, 152]),
        ("1," * 100_000, "1" * 199 + "2", None),
        ("a" * 300_000, "a" * 200, None),
        ("is (A+B)*[c] ok", "(A+B)*[c]", [3, 12]),
        ("The answer is -3.5.", "-3.5", [14, 18]),
        ("costs 12,500.00 or 12", "12500", [6, 15]),
        ("13 and 130 and 1.3", "3", None),
        ("anything", "", None),
        ("a" * 300, "a" * 300, None),
    ]
    for text, answer, expected in cases:
        assert page.evaluate(find, [text, answer]) == expected, answer[:20]


def test_listed_samples_are_exported(page_path: Path, visit: Open) -> None:
    run = load_run(page_path.parent)
    page = (opened := visit(page_path)).page
    page.locator("select[name=status]").select_option("wrong")
    page.get_by_label("text in the sample").fill("Step 3")

    def wrong(sample: Any) -> bool:
        verdict = sample.verdicts["numeric"]
        return not verdict.correct and verdict.answer is not None

    samples = [s for s in run.samples if wrong(s) and "step 3" in s.text.lower()]
    opened.wait(lambda: opened.row_count() == f"{len(samples)} of 600 samples")
    name, text = file_of(page, page.get_by_text("export JSONL").click)
    assert name == "run-samples.jsonl"
    written = [json.loads(line) for line in text.splitlines()]
    assert [(row["problem_id"], row["sample_index"], row["text"]) for row in written] == [
        (s.problem_id, s.index, safe_text(s.text)) for s in samples
    ]
    first = samples[0].verdicts
    assert first is not None
    verdict = written[0]["verdicts"]["numeric"]
    assert verdict == {"answer": first["numeric"].answer, "verdict": "wrong"}


@pytest.mark.usefixtures("undrawn")
def test_a_formula_in_a_table_is_a_text(tmp_path: Path, visit: Open) -> None:
    run = make_run(tmp_path / "run", num_problems=3, questions=["=cmd|' /C calc'!A0", '-1+"x"'])
    write_page([load_run(run)], run / "report.html", plots=False)
    page = visit(run / "report.html").page
    _, text = file_of(page, page.locator(".problems").get_by_text("export CSV").click)
    questions = [row["question"] for row in csv.DictReader(io.StringIO(text))]
    assert questions[:2] == ["'=cmd|' /C calc'!A0", '\'-1+"x"']


# Search trees


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_pruned_node_is_a_ring_in_both_themes(page_path: Path, visit: Open, scheme: str) -> None:
    """The darkest score does not hide the dashes of the outline."""
    page = (opened := visit(page_path, color_scheme=scheme)).page
    pruned = page.locator(".searches .picture .dot.pruned")
    opened.wait(lambda: pruned.count() > 0)
    style = "dot => [getComputedStyle(dot).fill, getComputedStyle(dot).strokeDasharray]"
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    for dot in pruned.all():
        assert dot.evaluate(style) == [paper, "3px, 2px"]
    assert page.locator(".searches .picture .edge.pruned").count() == pruned.count()
    opened.check()


def test_a_tree_is_a_picture(page_path: Path, visit: Open) -> None:
    tree = load_run(page_path.parent).trees[0]
    page = (opened := visit(page_path)).page
    picture = page.locator(".searches .picture")
    nodes = picture.locator("g.tree-node")
    opened.wait(lambda: nodes.count() == len(tree.nodes))
    assert picture.locator(".dot.best").count() == len(tree.path)
    assert picture.locator(".dot.pruned").count() == sum(n["pruned"] for n in tree.nodes)
    picture.locator("svg").focus()
    page.keyboard.press("ArrowRight")
    child = next(node for node in tree.nodes if node["parent_id"] == 0)
    shown = page.locator(".searches .picked").last
    opened.wait(lambda: child["text"] in (shown.text_content() or ""))
    head = shown.locator(".head").inner_text()
    assert f"{child['visits']} visits" in head and "prior 0.25" in head
    assert "verifier 0.50" in head and "restart 1" in head and 'data {"<b>": [1,' in head
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Enter")
    opened.wait(lambda: nodes.count() == 1)
    assert f"+{len(tree.nodes) - 1}" in picture.locator("g.tree-node").inner_html()
    page.keyboard.press("Enter")
    opened.wait(lambda: nodes.count() == len(tree.nodes))
    before = picture.locator("svg > g").get_attribute("transform")
    page.keyboard.press("+")
    assert picture.locator("svg > g").get_attribute("transform") != before
    page.keyboard.press("0")
    assert picture.locator("svg > g").get_attribute("transform") == before
    box = picture.locator("svg").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 45, box["y"] + 25)
    page.mouse.up()
    moved = re.search(
        r"translate\((\S+)", picture.locator("svg > g").get_attribute("transform") or ""
    )
    assert moved and float(moved[1]) == float(re.search(r"translate\((\S+)", before or "")[1]) + 40  # type: ignore[index]
    assert page.locator(".searches .tree .mark.invalid").all_inner_texts() == [
        "pruned: worth too little <i>"
    ] * sum(node["pruned"] for node in tree.nodes if _is_unfolded(node, tree.path))
    opened.check()


def _is_unfolded(node: Any, path: list[Any]) -> bool:
    return node["parent_id"] in {each["id"] for each in path} or node["parent_id"] is None


def test_a_tree_goes_to_other_programs(page_path: Path, visit: Open, treegen: Command) -> None:
    tree = load_run(page_path.parent).trees[0]
    page = (opened := visit(page_path)).page
    opened.wait(lambda: page.locator(".searches .picture").count() == 1)
    for label, suffix, expected in (
        ("Graphviz", "dot", tree.to_dot()),
        ("Mermaid", "mmd", tree.to_mermaid()),
    ):
        name, text = file_of(page, page.get_by_role("button", name=label).click)
        assert name == f"run-p0.{suffix}" and text == expected
    done = treegen("show", page_path.parent, "--tree", "p0", "--as", "dot")
    assert done.code == 0 and done.out == tree.to_dot()
    assert "pass --tree ID" in treegen("show", page_path.parent, "--as", "dot").error


@pytest.mark.usefixtures("undrawn")
def test_a_big_tree_is_folded_at_first(tmp_path: Path, visit: Open) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=2)
    (record,) = make_trees(run, num_trees=1)
    node = record["nodes"][1]
    fields = {"text": "more", "leaf": True, "pruned": False, "score": None}
    record["nodes"] = [
        {**record["nodes"][0], "leaf": False},
        *(
            {
                **node,
                **fields,
                "id": i,
                "parent_id": (i - 1) // 9,
                "leaf": i > 222,
                "score": i / 2000,
            }
            for i in range(1, 2000)
        ),
    ]
    record["best"] = 1999
    (run / "trees.jsonl").write_bytes(encode_record(record))
    write_page([load_run(run)], run / "report.html", plots=False)
    page = (opened := visit(run / "report.html")).page
    picture = page.locator(".searches .picture")
    opened.wait(lambda: picture.locator("g.tree-node").count() > 0)
    assert picture.locator("g.tree-node").count() < 100
    assert picture.locator(".dot.best").count() == 5
    page.get_by_text("unfold all").click()
    opened.wait(lambda: picture.locator("g.tree-node").count() == 2000)
    opened.check()


@pytest.mark.usefixtures("undrawn")
def test_labels_of_a_tree_stand_apart_from_its_top_on(tmp_path: Path, visit: Open) -> None:
    run = make_run(tmp_path / "run", num_problems=2, num_samples=2)
    (record,) = make_trees(run, num_trees=1)
    root, node = record["nodes"][:2]
    fields = {"text": "a step of some length", "pruned": False, "score": 0.5, "visits": 2}
    # The root, 8 nodes below it, below each of these one or three, and below each of those one.
    parents = [0] * 8 + [1 + i for i in range(8) for _ in range(1 + 2 * (i % 2))]
    parents += range(9, 1 + len(parents))
    record["nodes"] = [
        {**root, "leaf": False},
        *(
            {
                **node,
                **fields,
                "id": i,
                "parent_id": parent,
                "depth": 1 + (i > 8) + (i > 24),
                "leaf": i not in parents,
            }
            for i, parent in enumerate(parents, 1)
        ),
    ]
    record["best"] = 1
    (run / "trees.jsonl").write_bytes(encode_record(record))
    write_page([load_run(run)], run / "report.html", plots=False)
    page = (opened := visit(run / "report.html")).page
    picture = page.locator(".searches .picture")
    opened.wait(lambda: picture.locator("g.tree-node").count() == len(record["nodes"]))
    boxes = [
        (x, y, x + width, y + height)
        for x, y, width, height in picture.locator("text").evaluate_all(
            "all => all.filter(e => e.textContent).map(e => e.getBoundingClientRect())"
            ".map(b => [b.x, b.y, b.width, b.height])"
        )
    ]
    assert len(boxes) > 2 * len(parents)
    for (a, b, c, d), (left, up, right, down) in combinations(boxes, 2):
        assert min(c, right) - max(a, left) < 1 or min(d, down) - max(b, up) < 1
    seen = picture.locator("svg").bounding_box()
    assert seen is not None
    top = min(up for _, up, _, _ in boxes)
    assert seen["y"] - 2 <= top < seen["y"] + 40  # though the tree is higher than the picture
    assert max(down for *_, down in boxes) > seen["y"] + seen["height"]
    opened.check()


# Several runs


@pytest.fixture(scope="module")
def ten_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of ten runs of searches."""
    folder = tmp_path_factory.mktemp("ten")
    runs = [
        make_search_run(folder / f"seed-{i}" / "beam", num_problems=4, seed=i) for i in range(10)
    ]
    with empty_pictures():
        write_page([load_run(run) for run in runs], folder / "report.html", plots=False)
    return folder / "report.html"


def test_ten_runs_are_shown_one_at_a_time(ten_path: Path, visit: Open) -> None:
    page = (opened := visit(ten_path)).page
    shown = page.locator("article:visible")
    assert page.locator("article").count() == 10 and shown.count() == 1
    assert shown.locator("h2").inner_text() == "seed-0/beam"
    page.locator("nav a", has_text="seed-7/beam").click()
    opened.wait(lambda: shown.locator("h2").inner_text() == "seed-7/beam")
    assert page.locator("nav a[aria-current]").inner_text() == "seed-7/beam"
    run = load_run(ten_path.parent / "seed-7" / "beam")
    comparison = page.locator(".comparison")
    opened.wait(lambda: comparison.locator(".row-count").first.inner_text() == "4 of 4 problems")
    cells = comparison.locator(".row").first.locator("> *").all_inner_texts()
    solved = next(tree.solved for tree in run.trees if tree.problem_id == cells[0])
    assert cells[1 + 7] == ("1.000" if solved else "0.000")
    page.goto(f"{ten_path.resolve().as_uri()}#run=run-3&problem={cells[0]}")
    opened.wait(lambda: shown.locator("h2").inner_text() == "seed-2/beam")
    opened.wait(lambda: shown.locator(".searches h4").first.inner_text() == cells[0])
    opened.check()


# The first run is decoded at once, and each other part a second after it is asked for.
SLOW = """(() => {
  const decode = Response.prototype.text;
  let calls = 0;
  Response.prototype.text = async function () {
    if (calls++) await new Promise((resume) => setTimeout(resume, 1000));
    return decode.call(this);
  };
})()"""


def test_a_run_can_be_chosen_while_others_load(ten_path: Path, visit: Open) -> None:
    page = (opened := visit(ten_path, script=SLOW)).page
    shown = page.locator("article:visible")
    assert page.locator(".comparison[data-ready]").count() == 0
    for name in ("seed-3/beam", "seed-7/beam"):
        page.locator("nav a", has_text=name).click()
    opened.wait(lambda: page.locator(".comparison[data-ready]").count() == 1)
    assert shown.locator("h2").inner_text() == "seed-7/beam"
    assert page.locator("nav a[aria-current]").inner_text() == "seed-7/beam"
    opened.wait(lambda: shown.locator(".searches h4").count() > 0)
    # Keys go to the run that is shown.
    page.keyboard.press("n")
    opened.wait(lambda: shown.locator(".searches h4").first.inner_text() == "countdown-1")
    opened.check()


def test_a_run_that_is_read_while_others_load_stays_in_place(ten_path: Path, visit: Open) -> None:
    slow = SLOW.replace("1000", "calls < 12 ? 300 * calls : 0")
    page = (opened := visit(ten_path, script=slow, height=300)).page
    page.locator("nav a", has_text="seed-1/beam").click()
    opened.wait(lambda: page.locator("article[data-ready]").count() == 2)
    assert page.locator(".comparison[data-ready]").count() == 0
    page.wait_for_timeout(100)
    page.evaluate("() => scrollTo(0, 9)")
    opened.wait(lambda: page.locator(".comparison[data-ready]").count() == 1)
    page.wait_for_timeout(100)
    assert page.evaluate("() => scrollY") == 9
    opened.check()


def test_a_run_that_opens_late_leaves_the_address_and_the_notice(
    ten_path: Path, visit: Open
) -> None:
    page = (opened := visit(ten_path, script=SLOW)).page
    opened.wait(lambda: page.locator(".comparison[data-ready]").count() == 1)
    page.locator("nav a", has_text="seed-3/beam").click()
    # Events of a new address come later and read the present address.
    chosen = page.locator("nav a[aria-current]", has_text="seed-3/beam")
    opened.wait(lambda: chosen.count() == 1)
    page.evaluate("() => { location.hash = '#run=x'; }")
    opened.wait(lambda: page.locator("article[data-ready]").count() == 2)
    page.wait_for_timeout(300)  # the address is written a moment later
    assert opened.place() == "#run=x" and page.locator(".unknown").is_visible()
    opened.check()


def test_an_address_names_a_run_or_is_refused(ten_path: Path, visit: Open) -> None:
    """A run has its name, and run-N by its place; an unknown name opens no other run."""
    page = (opened := visit(ten_path)).page
    shown, notice = page.locator("article:visible"), page.locator(".unknown")
    base = ten_path.resolve().as_uri()
    named = page.locator("nav.runs a", has_text="seed-7/beam")
    assert named.get_attribute("href") == "#run=seed-7%2Fbeam"
    page.goto(f"{base}#run=seed-7%2Fbeam&problem=countdown-1&search=0")
    opened.wait(lambda: shown.locator("h2").inner_text() == "seed-7/beam")
    opened.wait(lambda: shown.locator(".searches h4").first.inner_text() == "countdown-1")
    assert not notice.is_visible()
    for at, text in (
        ("#run=mcts", "This page has no run named mcts. Its runs: seed-0/beam, seed-1/beam, "),
        ("#run=seed-7%2Fbeam&problem=nil", "The run seed-7/beam has no problem nil."),
        ("#problem=nil", "No run of this page has a problem nil."),
        (
            "#run=run-2&problem=countdown-1&search=4",
            "Problem countdown-1 of the run seed-1/beam has no search 4.",
        ),
    ):
        for is_new in (False, True):
            page.goto(f"{base}{at}")
            if is_new:
                page.reload()
            opened.wait(lambda text=text: notice.inner_text().startswith(text))  # type: ignore[misc]
            assert shown.count() == (0 if at == "#run=mcts" else 1)
            assert opened.place() == at
            of_runs = page.locator(".beside" if at == "#problem=nil" else ".detail")
            assert of_runs.locator("visible=true").count() == 0
    page.goto(f"{base}#run=mcts")
    opened.wait(lambda: shown.count() == 0)
    named.click()
    opened.wait(lambda: shown.count() == 1)
    assert shown.locator("h2").inner_text() == "seed-7/beam" and not notice.is_visible()
    assert opened.complaints == []


def test_an_unknown_sample_opens_no_other(page_path: Path, visit: Open) -> None:
    opened = visit(page_path, at="#problem=p3&sample=99")
    notice = opened.page.locator(".unknown")
    opened.wait(notice.is_visible)
    assert notice.inner_text().endswith(" has no sample 99.")
    assert opened.page.locator(".samples .detail").is_hidden()
    opened.page.locator(".samples .row").first.click()
    opened.wait(notice.is_hidden)
    opened.check()


@pytest.mark.usefixtures("undrawn")
def test_samples_of_two_runs_stand_side_by_side(
    treegen: Command, tmp_path: Path, visit: Open
) -> None:
    a = make_run(tmp_path / "a", num_problems=8, num_samples=3)
    b = make_run(tmp_path / "b", num_problems=8, num_samples=4, seed=1)
    done = treegen("compare", a, b, "--no-plots", "--html", tmp_path / "both.html")
    assert done.code == 0 and done.document["page"] == str(tmp_path / "both.html")
    found = compare_runs(load_run(a), load_run(b))
    page = (opened := visit(tmp_path / "both.html")).page
    assert page.locator("table").first.locator("tbody tr").count() == len(found.differences)
    comparison = page.locator(".comparison")
    comparison.locator(".row", has_text="p5").first.click()
    sides = comparison.locator(".side")
    opened.wait(lambda: sides.count() == 2)
    views = [load_run(path) for path in (a, b)]

    def texts() -> list[str | None]:
        return [side.locator(".said .text").text_content() for side in sides.all()]

    opened.wait(lambda: texts() == [view.problems[5].samples[0].text for view in views])
    page.keyboard.press("j")
    opened.wait(lambda: texts() == [view.problems[5].samples[1].text for view in views])
    opened.wait(lambda: opened.place() == "#problem=p5&sample=1")
    for _ in range(3):  # the second run has one sample more
        comparison.get_by_text("sample \u25b8").click()
    opened.wait(lambda: sides.nth(0).get_by_text("no sample here").count() == 1)
    assert (
        sides.nth(1).locator(".said .text").text_content() == views[1].problems[5].samples[3].text
    )
    link = page.locator("figure[data-plot=by_problem] a.plot-link")
    link.focus()
    best = max(range(8), key=lambda i: (found.differences[0].by_problem[i], -i))
    assert link.get_attribute("title") == f"p{best}"
    page.keyboard.press("Enter")
    opened.wait(lambda: comparison.locator(".beside h3").inner_text() == f"p{best}")
    opened.check()
    assert (
        "--html must be a file name that ends in .html"
        in treegen("compare", a, b, "--html", "x").error
    )


@pytest.mark.usefixtures("undrawn")
def test_the_last_sample_is_reached_over_missing_ones(tmp_path: Path, visit: Open) -> None:
    runs = [make_run(tmp_path / name, num_problems=2, num_samples=4) for name in "ab"]
    for run in runs:
        lines = (run / "samples.jsonl").read_bytes().splitlines(keepends=True)
        (run / "samples.jsonl").write_bytes(b"".join([lines[0], *lines[3:]]))
    views = list(map(load_run, runs))
    assert [sample.index for sample in views[0].problems[0].samples] == [0, 3]
    write_page(views, tmp_path / "both.html", plots=False)
    opened = visit(tmp_path / "both.html")
    comparison = opened.page.locator(".comparison")
    comparison.locator(".row", has_text="p0").first.click()
    opened.wait(lambda: opened.place() == "#problem=p0&sample=0")
    for index in range(1, 4):
        comparison.get_by_text("sample \u25b8").click()
        opened.wait(lambda at=index: opened.place() == f"#problem=p0&sample={at}")  # type: ignore[misc]
    assert comparison.locator(".said .text").count() == 2


def test_the_size_of_cached_parts_is_that_of_their_texts(page_path: Path, visit: Open) -> None:
    sizes = visit(page_path).page.evaluate(
        """() => Promise.all(["problems", "trees"].map(async (name) => {
          const parts = new Parts(`run-1-${name}`, [0], 3);
          const items = await parts.part(0);
          return [parts.size, JSON.stringify(items).length];
        }))"""
    )
    assert all(size >= length > 0 for size, length in sizes), sizes


@pytest.mark.usefixtures("undrawn")
def test_hostile_text_stays_text_in_tables_and_pictures(tmp_path: Path, visit: Open) -> None:
    runs = []
    for seed in range(2):
        run = make_run(
            tmp_path / f"<b>{seed}</b>",
            num_problems=len(HOSTILE),
            num_samples=2,
            seed=seed,
            draw=lambda rng, number, index: f"{HOSTILE[number]} is {number}",
            questions=HOSTILE[:6],
        )
        record = make_trees(run, num_trees=1)[0]
        for node, text in zip(record["nodes"], HOSTILE * 3, strict=False):
            node |= {
                "text": text[:5000],
                "pruned_because": text[:500],
                "data": {text[:99]: text[:500]},
            }
            node |= {"pruned": True, "scores": {text[:50]: 1.0}}
        record |= {"answer": HOSTILE[2], "stopped": HOSTILE[0], "method": HOSTILE[1]}
        (run / "trees.jsonl").write_bytes(encode_record(record))
        runs.append(load_run(run))
    found = compare_runs(*runs)
    write_page(runs, tmp_path / "both.html", plots=False, comparison=found)
    page = (opened := visit(tmp_path / "both.html")).page
    opened.wait(lambda: page.locator(".searches .picture:visible").count() == 1)
    for label in page.locator(".picture:visible text").all()[:40]:
        assert label.evaluate("label => label.childElementCount") == 0
    for key in ["n"] * len(HOSTILE):
        page.locator(".comparison .list").hover()
        page.keyboard.press(key)
    beside = page.locator(".beside")
    opened.wait(lambda: beside.locator("h3").inner_text() == f"p{len(HOSTILE) - 1}")
    assert beside.locator("script, img, b, i").count() == 0
    opened.check()


# Structure


def headings(page: "Page") -> list[int]:
    """The levels of the headings that are to be seen, in order."""
    found = page.locator(":is(h1, h2, h3, h4, h5, h6):visible").all()
    return [int(each.evaluate("e => e.tagName")[1]) for each in found]


@pytest.mark.parametrize("several", [False, True])
def test_headings_leave_no_level_out(
    page_path: Path, ten_path: Path, visit: Open, several: bool
) -> None:
    at = "#run=run-2&problem=countdown-0" if several else "#problem=p3&sample=1"
    page = (opened := visit(ten_path if several else page_path, at=at)).page
    opened.wait(lambda: page.locator(".detail:visible").count() > 0)
    opened.wait(lambda: page.locator(".picture:visible").count() == 1)
    found = headings(page)
    assert found.count(1) == 1 and found[0] == 1
    steps = [b - a for a, b in pairwise(found)]
    assert max(steps) == 1, found
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map((e) => e.id)")
    assert len(ids) == len(set(ids))


def test_several_runs_are_printed_as_on_screen(ten_path: Path, visit: Open) -> None:
    page = visit(ten_path, color_scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    assert page.locator("article:visible").count() == 1
    assert (
        page.locator("nav, .browsing, .controls, .plot-link").locator("visible=true").count() == 0
    )
    assert page.get_by_text("Budgets and costs").first.is_visible()
    width = "() => [document.documentElement.scrollWidth, innerWidth]"
    page.set_viewport_size({"width": 688, "height": 900})
    wide, there = page.evaluate(width)
    assert wide <= there
