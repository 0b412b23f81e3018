"""How many tokens a large judging computes: those of its plan, which no model is needed for."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from report_cases import make_run

import treegen
from treegen.evals.judging.judgement_files import begin, open_judgements
from treegen.evals.judging.pipeline import open_runs
from treegen.evals.judging.rubric import load_rubric
from treegen.evals.judging.runner import _JudgePrompts
from treegen.evals.judging.settings import JudgeSettings
from treegen.evals.multiple_choice import num_distinct
from treegen.prompts.tree import Node


def planned(tmp_path: Path, problems: int, answers: int, wordings: int, repeats: int) -> list[int]:
    """Tokens that are computed by the plan, distinct ones, and those of all prompts apart."""
    run = make_run(tmp_path / "run", num_problems=problems, num_samples=answers)
    settings = JudgeSettings(
        rubric=load_rubric("correctness"), wordings=wordings, repeats=repeats, verdicts="samples"
    )
    with ExitStack() as stack:
        found = open_runs([run], {}, stack)
        judging = begin(found.runs[0], [], "demo", "0", settings)
        lines = stack.enter_context(open_judgements(run, judging))
        llm = stack.enter_context(treegen.LLM("demo", device="cpu", memory="32MiB"))
        asking = _JudgePrompts(judging, found.answers, lines, llm)
        nodes = [asking.node(case, repeats, reply_prefix="") for case in asking.cases]
        assert len(nodes) == problems * answers * wordings
        plan = llm.plan(Node("", children=nodes, samples=0), {"max_tokens": 8})
    computed = sum(len(segment.tokens) for segment in plan.segments)
    apart = sum(len(request.tokens) * repeats for request in plan.requests)
    return [computed, num_distinct([request.tokens for request in plan.requests]), apart]


def test_a_plan_computes_what_prompts_share_once(tmp_path: Path) -> None:
    computed, distinct, apart = planned(tmp_path, 12, 4, 3, 4)
    assert distinct <= computed <= 1.1 * distinct and apart > 5 * computed


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_a_plan_of_a_thousand_problems_eight_answers_and_twelve_verdicts(tmp_path: Path) -> None:
    computed, distinct, apart = planned(tmp_path, 1000, 8, 3, 4)
    assert distinct <= computed <= 1.1 * distinct and apart > 5 * computed
    print(f"{computed:,} computed, {distinct:,} distinct, {apart:,} apart")  # noqa: T201
