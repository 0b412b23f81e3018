"""A search of your own, run by `treegen search` like the methods that come with treegen.

    treegen search countdown --model demo -m examples/search_own.py:narrowing
    treegen search countdown --model demo -m examples/search_own.py:narrowing -a widths=6,2,1
    treegen search countdown --model demo --compare sample,examples/search_own.py:narrowing

It gets the root of one problem's tree. A parameter named `tools` gets the functions of the task.
All other parameters are arguments for `-a`, read by their types.
"""

from typing import Literal

from treegen.evals.search.method_types import MethodContext
from treegen.search import SearchNode, SearchOutcome


async def narrowing(
    root: SearchNode,
    tools: MethodContext,
    widths: tuple[int, ...] = (8, 4, 2),
    keep: Literal["best", "first"] = "best",
) -> SearchOutcome | None:
    """A beam that is wide where a solution begins and narrow where it ends.

    Args:
        widths: Steps to draw at each depth; half of them go on. The last holds for all further
            depths.
        keep: Which half goes on.
    """
    level = [root]
    for depth in range(tools.settings.depth):
        width = widths[min(depth, len(widths) - 1)]
        share = max(1, width // len(level))
        steps = [step for node in level for step in await tools.step(node, share)]
        for step, value in zip(steps, await tools.evaluate(steps), strict=True):
            step.value = value
        if keep == "best":
            steps.sort(key=lambda step: step.value or 0.0, reverse=True)
        for step in steps:
            if tools.is_solved(step):
                return SearchOutcome(step, (step,))
        level = [step for step in steps if not tools.done(step)][: max(1, width // 2)]
        if not level:
            break
    return None  # the solutions in the tree count
