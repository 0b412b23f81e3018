"""The page of a report in a real browser: opened from disk, used, and given hostile text."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
from browsing import Visit
from report_cases import HOSTILE, make_run, make_timeline, make_trees

from treegen.common.formatting import safe_text
from treegen.evals.verdict import Verdict
from treegen.report.html_page import write_page
from treegen.report.load import load_run
from treegen.report.view import ProblemView, Sample


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of an ordinary run with search trees."""
    run = make_run(tmp_path_factory.mktemp("report") / "run", num_problems=45, num_samples=12)
    make_trees(run)
    make_timeline(run)
    path = run / "report.html"
    write_page([load_run(run)], path, plots=False)
    return path


@pytest.fixture(scope="module")
def hostile_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a run whose texts mean harm, wherever text can be."""
    run = make_run(
        tmp_path_factory.mktemp("report") / "<b>run</b>",
        num_problems=len(HOSTILE),
        num_samples=3,
        draw=lambda rng, number, index: f"{HOSTILE[(number + index) % len(HOSTILE)]} is {number}",
        questions=HOSTILE[:6],
    )
    make_trees(run, text=HOSTILE[0] + HOSTILE[3])
    path = run / "report.html"
    write_page([load_run(run)], path, plots=False)
    return path


def test_a_page_opens_from_disk_without_network_and_errors(
    page_path: Path, visit: Callable[..., Visit]
) -> None:
    opened = visit(page_path)
    opened.check()
    assert opened.row_count() == "540 of 540 samples"
    pictures = opened.page.locator("figure img")
    assert pictures.count() >= 6
    for index in range(pictures.count()):
        assert pictures.nth(index).evaluate("image => image.complete && image.naturalWidth > 0")
        assert pictures.nth(index).get_attribute("alt")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out_at_any_width(
    page_path: Path, visit: Callable[..., Visit], width: int, scheme: str
) -> None:
    opened = visit(page_path, width=width, color_scheme=scheme)
    opened.page.locator(".samples .row").nth(2).click()
    opened.page.wait_for_selector(".samples .detail:not([hidden])")
    assert opened.page.evaluate("() => document.documentElement.scrollWidth") <= width
    paper = opened.page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    opened.check()


@pytest.mark.parametrize("width", [360, 1280])
def test_type_is_readable_and_the_pictures_of_a_row_are_aligned(
    page_path: Path, visit: Callable[..., Visit], width: int
) -> None:
    page = visit(page_path, width=width).page
    # Labels of a picture are as large as its SVG says, times the scale at which it is shown.
    sizes = page.evaluate(
        """() => [...document.querySelectorAll("figure[data-plot] img")].map((image) => {
          const svg = atob(image.src.split(",")[1]);
          const fonts = [...svg.matchAll(/scale\\(([0-9.]+) -/g)].map((match) => 100 * match[1]);
          const units = Number(svg.match(/viewBox="0 0 ([0-9.]+)/)[1]);
          const box = image.getBoundingClientRect();
          return [Math.min(...fonts) * (box.width / units), box.top, box.left];
        })"""
    )
    assert len(sizes) >= 6 and all(size >= 9 for size, _, _ in sizes), sizes
    tops: dict[int, set[int]] = {}
    headings = page.evaluate(
        """() => [...document.querySelectorAll("figure[data-plot]")].map((figure) =>
          [figure.querySelector("h3").getBoundingClientRect().top,
           figure.querySelector("img").getBoundingClientRect().top])"""
    )
    for heading, image in headings:
        tops.setdefault(round(heading), set()).add(round(image))
    assert all(len(images) == 1 for images in tops.values()), tops
    assert width == 360 or any(len(headings) > len(tops) for _ in tops)
    small = page.evaluate(
        """() => [...document.querySelectorAll("body *")].filter((each) => each.innerText
          && parseFloat(getComputedStyle(each).fontSize) < 9).length"""
    )
    assert small == 0


def test_samples_are_filtered_and_searched(page_path: Path, visit: Callable[..., Visit]) -> None:
    run = load_run(page_path.parent)
    page = (opened := visit(page_path)).page
    right = [s for s in run.samples if s.verdicts and s.verdicts["numeric"].correct]

    def shown(number: int) -> Callable[[], bool]:
        return lambda: opened.row_count() == f"{number:,} of 540 samples"

    page.locator("select[name=status]").select_option("right")
    opened.wait(shown(len(right)))
    assert set(page.locator(".samples .row .mark").all_inner_texts()) == {"right"}
    page.locator("select[name=finish]").select_option("length (truncated)")
    opened.wait(shown(sum(s.finish_reason == "length" for s in right)))
    page.locator("select[name=status]").select_option("any")
    page.locator("select[name=finish]").select_option("any")
    page.locator("select[name=filter]").select_option("strict-match")
    page.locator("select[name=status]").select_option("invalid")
    invalid = [s for s in run.samples if s.verdicts and s.verdicts["strict-match"].answer is None]
    assert invalid
    opened.wait(shown(len(invalid)))
    page.locator("select[name=status]").select_option("any")
    page.get_by_label("problem", exact=True).fill("p7")
    opened.wait(shown(12))
    page.get_by_label("problem", exact=True).fill("")
    page.get_by_label("text in the sample").fill("ANSWER IS 7.")
    opened.wait(shown(sum("answer is 7." in s.text for s in run.samples)))
    page.get_by_label("text in the sample").fill("no such text anywhere")
    opened.wait(shown(0))
    assert page.locator(".samples .row").count() == 0
    opened.check()


def test_a_vote_can_be_looked_for(page_path: Path, visit: Callable[..., Visit]) -> None:
    from treegen.report.curves import vote_shares

    shares = vote_shares(load_run(page_path.parent).verdicts("numeric"))
    page = (opened := visit(page_path)).page
    for name, wanted in (
        ("tied", [s for s in shares if s.tied]),
        ("won", [s for s in shares if s.won and not s.tied]),
        ("lost", [s for s in shares if not s.won and not s.tied]),
    ):
        assert wanted
        page.locator("select[name=vote]").select_option(name)
        number = 12 * len(wanted)
        opened.wait(lambda number=number: opened.row_count() == f"{number} of 540 samples")  # type: ignore[misc]


def test_a_sample_is_shown_in_full_and_keys_move_on(
    page_path: Path, visit: Callable[..., Visit]
) -> None:
    run = load_run(page_path.parent)
    page = (opened := visit(page_path)).page
    page.locator(".samples .row").nth(3).click()
    detail = page.locator(".samples .detail")
    opened.wait(lambda: detail.locator("h3").inner_text() == "p0 #3")
    problem = run.problems[0]
    texts = detail.locator(".text").all_text_contents()
    assert texts == [problem.question, problem.answer, problem.samples[3].text]
    votes = [int(text) for text in detail.locator(".vote .number").all_inner_texts()]
    assert sum(votes) == 12 and votes == sorted(votes, reverse=True)
    page.keyboard.press("ArrowDown")
    opened.wait(lambda: detail.locator("h3").inner_text() == "p0 #4")
    page.locator(".samples .list").evaluate("list => { list.scrollTop = 1e9; }")
    opened.wait(lambda: page.locator(".samples .row .name").last.inner_text() == "p44 #11")


def test_the_prompt_tree_folds(page_path: Path, visit: Callable[..., Visit]) -> None:
    page = (opened := visit(page_path)).page
    tree = page.locator(".prompts .tree")
    problems = tree.locator(":scope > .node > .below > .node")
    assert problems.count() == 20
    tree.locator(":scope > .node > .below > .more").click()
    opened.wait(lambda: problems.count() == 40)
    first = problems.first
    assert first.get_attribute("aria-expanded") == "false"
    first.locator(":scope > .head > .fold").click()
    opened.wait(lambda: first.locator(":scope > .below > .node").count() == 12)
    assert first.get_attribute("aria-expanded") == "true"
    assert first.locator(":scope > .below > .best").count() == 1
    first.locator(":scope > .head > .fold").click()
    assert first.locator(":scope > .below").count() == 0


def test_search_trees_show_their_best_path(page_path: Path, visit: Callable[..., Visit]) -> None:
    record = load_run(page_path.parent).trees[2]
    page = (opened := visit(page_path)).page
    page.locator(".searches .row").nth(2).click()
    tree = page.locator(".searches .tree")
    opened.wait(lambda: tree.locator(".best").count() == len(record.path))
    texts = [box.text_content() for box in tree.locator(".best > .block > .text").all()]
    assert texts == [node["text"] for node in record.path]
    tree.locator(".fold").first.click()
    assert tree.locator(".node").count() == 1
    page.get_by_text("unfold the best path").click()
    opened.wait(lambda: tree.locator(".best").count() == len(record.path))


def test_hostile_text_stays_text(hostile_path: Path, visit: Callable[..., Visit]) -> None:
    run = load_run(hostile_path.parent)
    page = (opened := visit(hostile_path)).page
    samples = list(run.samples)
    detail = page.locator(".samples .detail")
    for at, sample in enumerate(samples):
        if at:
            page.keyboard.press("ArrowDown")
        else:
            page.locator(".samples .row").first.click()
        name = f"{sample.problem_id} #{sample.index}"
        opened.wait(lambda name=name: detail.locator("h3").inner_text() == name)  # type: ignore[misc]
        shown = detail.locator(".said .text")
        # Long ones show a part at first; what is shown is the text as it is safe to look at.
        assert shown.text_content() == safe_text(sample.text)[:20_000]
        assert shown.evaluate("text => text.querySelectorAll(':not(mark)').length") == 0
    for fold in page.locator(".prompts .fold").all()[1:]:
        fold.click()
    assert page.locator(".prompts .node").count() == 1 + 8 + 24
    page.locator(".searches .row").nth(1).click()
    opened.wait(lambda: page.locator(".searches .tree .node").count() > 1)
    page.get_by_label("text in the sample").fill("</script>")
    opened.wait(lambda: (text := opened.row_count()).endswith(" of 24 samples") and text[0] != "2")
    opened.check()


def test_the_same_text_would_act_as_markup(tmp_path: Path, visit: Callable[..., Visit]) -> None:
    # Else the tests above could not fail.
    page = tmp_path / "page.html"
    page.write_text(f"<article data-ready>{HOSTILE[0]}{HOSTILE[2]}</article>", encoding="utf-8")
    opened = visit(page)
    opened.wait(lambda: opened.page.evaluate("() => window.owned") == 1)
    with pytest.raises(AssertionError):
        opened.check()


def test_a_megabyte_in_one_line_is_shown_in_parts(
    hostile_path: Path, visit: Callable[..., Visit]
) -> None:
    page = (opened := visit(hostile_path, width=360)).page
    page.get_by_label("text in the sample").fill("a" * 5000)
    opened.wait(lambda: opened.row_count() == "3 of 24 samples")
    page.locator(".samples .row").first.click()
    block = page.locator(".samples .detail .said")
    opened.wait(lambda: len(block.locator(".text").text_content() or "") == 20_000)
    for _ in range(8):
        if block.locator(".more").count():
            block.locator(".more").click()
    assert len(block.locator(".text").text_content() or "") > 500_000
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
    opened.check()


@pytest.mark.usefixtures("undrawn")
def test_fifty_thousand_samples_stay_quick(tmp_path: Path, visit: Callable[..., Visit]) -> None:
    run = load_run(make_run(tmp_path / "run", num_problems=2, num_samples=2))
    right, wrong = Verdict("1", True), Verdict("2", False)

    def sample(name: str, index: int) -> Sample:
        text = f"{name} {index} thinks, " * 20
        verdict = right if index % 3 else wrong
        return Sample(name, index, text, 90, -1.0, "stop", dict.fromkeys(run.filters, verdict))

    problems = [
        ProblemView(f"q{i}", "?", "1", 700, tuple(sample(f"q{i}", j) for j in range(50)))
        for i in range(1000)
    ]
    # As a run would be read, without the minute that writing and judging one takes.
    many = dataclasses.replace(run, problems=tuple(problems), tree=None)
    write_page([many], tmp_path / "report.html", plots=False)
    # Its first rows need no more than the first parts of the file.
    whole = (tmp_path / "report.html").read_text(encoding="utf-8")
    begun = whole[: whole.index('id="run-1-problems-1"')].rpartition("<script")[0]
    assert "run-1-texts-0" in begun and "run-1-texts-1" not in begun
    (tmp_path / "begun.html").write_text(begun, encoding="utf-8")
    first = (opened := visit(tmp_path / "begun.html")).page.locator(".samples .row").first
    opened.wait(lambda: "q0 0 thinks" in first.inner_text())
    page = (opened := visit(tmp_path / "report.html")).page
    page.wait_for_selector(".samples .row")
    # Only rows in sight exist; a bare list of so many takes most of a minute.
    assert page.locator(".samples .row").count() < 60
    assert page.evaluate("() => document.querySelectorAll('*').length") < 3000
    page.locator("select[name=status]").select_option("wrong")
    opened.wait(lambda: opened.row_count() == "17,000 of 50,000 samples")
    assert page.locator(".samples .row").count() < 60
    page.locator("select[name=status]").select_option("any")
    page.get_by_label("text in the sample").fill("q999 49 thinks")
    opened.wait(lambda: opened.row_count() == "1 of 50,000 samples")
    assert page.evaluate("() => document.querySelectorAll('*').length") < 3000
    opened.check()


def test_it_prints_light_and_without_controls(page_path: Path, visit: Callable[..., Visit]) -> None:
    page = visit(page_path, color_scheme="dark").page
    page.emulate_media(media="print", color_scheme="dark")
    assert not page.locator(".samples").is_visible()
    assert page.locator("figure img").first.is_visible()
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    assert page.pdf(format="A4").startswith(b"%PDF")
