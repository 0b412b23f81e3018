"""What methods of search found, beside what each cost."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from treegen.cli.render import markdown

_COSTS: Final = {
    "Decoded": "tokens_decoded",
    "Prefilled": "tokens_prefilled",
    "Re-prompting": "tokens_reprompted",
    "Calls": "calls",
    "Nodes": "nodes",
}


def cost_table(results: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with a row for each run, from their results.json.

    Costs are means over problems, tokens but for calls and nodes; re-prompting is what prefilling
    each call's whole context anew would have cost. Seconds are those of the whole run.
    """
    head = ["Method", "Solved", "95% interval", *_COSTS, "Failed", "Seconds"]
    rows = [
        [
            each["method"],
            f"{each['num_solved']}/{each['done']}",
            _interval(each["solved"]),
            *(_mean(each["cost"][name]["mean"]) for name in _COSTS.values()),
            str(len(each["errors"])),
            f"{each['seconds']:,.1f}",
        ]
        for each in results
    ]
    task, budget = results[0]["task"], results[0]["settings"]["budget"]
    limits = ", ".join(f"{value:,} {name}" for name, value in budget.items() if value is not None)
    done = results[0]["done"]
    return (
        f"{task['name']}: {done:,} problems from {task['source']}; at most {limits} per problem\n\n"
        f"{markdown(head, rows, right=range(1, len(head)))}\n\n"
        "Costs are means per problem."
    )


def _interval(solved: Mapping[str, float] | None) -> str:
    if solved is None:
        return "n/a"
    return f"{solved['value']:.3f} [{solved['low']:.3f}, {solved['high']:.3f}]"


def _mean(value: float | None) -> str:
    return "n/a" if value is None else f"{value:,.1f}"
