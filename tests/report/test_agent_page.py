"""The page of a run of agents: episodes as chats with tool calls, beside their siblings."""

from collections.abc import Callable
from pathlib import Path

import pytest
from agent_runs import load_job, run_job, walker
from browsing import Visit

from treegen.report.html_page import write_page
from treegen.report.html_page_data import read_step
from treegen.report.load import load_run


@pytest.fixture(scope="module")
def page_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("agents") / "run"
    job = load_job(
        "text-world", "beam", extra={"problems": "2", "level": "easy"}, width=2, expand=3, depth=12
    )
    run_job(job, walker(0.5), run)
    path = run / "report.html"
    write_page([load_run(run)], path, plots=False)
    return path


def test_a_step_is_converted_to_texts() -> None:
    step = {
        "text": "Hm.",
        "calls": [{"name": "go", "arguments": {"direction": 'a "b"', "n": 2}}],
        "observations": [{"text": "No.", "exit_status": 3, "num_images": 1, "failure": "late"}],
        "end": "failed",
        "failure": "late",
        "reward": 0.5,
    }
    assert read_step(step) == {
        "thoughts": "",
        "text": "Hm.",
        "calls": ['go(direction="a \\"b\\"", n=2)'],
        "results": ["No.\n[exit status 3]\n[1 images]\n[late]"],
        "end": "late",
        "reward": 0.5,
    }
    for data in (None, 3, {}, {"other": 1}, {"calls": [1]}, {"calls": [{"name": "x"}]}):
        assert read_step(data) is None


def test_an_episode_is_a_chat_beside_its_siblings(
    page_path: Path, visit: Callable[..., Visit]
) -> None:
    opened = visit(page_path)
    page = opened.page
    page.locator(".searches .row").first.click()
    page.wait_for_selector(".searches .picture .tree-node")
    best = page.locator(".searches .tree .node.best").last
    best_id = load_run(page_path.parent).trees[0].best
    node = page.locator(f'.searches .picture .tree-node[data-id="{best_id}"]')
    node.dispatch_event("pointerdown")
    page.locator("body").dispatch_event("pointerup")
    page.wait_for_selector(".picked .sibling.chosen")
    assert page.locator(".picked .sibling").count() >= 2
    assert page.locator(".picked .sibling.chosen").count() == 1
    assert page.locator(".picked .sibling.chosen .turn.tool").count() == 1
    assert "(" in page.locator(".picked .sibling.chosen .call").inner_text()
    assert page.locator(".picked .chat .turn.assistant").count() >= 1
    assert best.count() == 1
    opened.check()
