"""The options of judges, which `treegen judge` and `treegen eval` share, and their effect."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.options.options import add_options, option

if TYPE_CHECKING:
    from treegen.api.judge_plan import JudgingPlan
    from treegen.api.judging import Judgings

# The settings of the run's model that apply to judges too.
_SHARED = ("device", "memory", "max_rows", "reproducible", "eager", "trust_remote_code")
JUDGE = add_options(
    option(
        "--judge DIR|NAME",
        "A model that judges; several are a jury. Default: judgements that are stored, read again.",
        multiple=True,
    ),
    option(
        "--rubric NAME|FILE",
        "correctness, rating, pairwise, simpleqa, or a .yaml or .jinja file. Default: that of the "
        "task, or correctness; of pairs, pairwise.",
    ),
    option("--wordings N", "Wordings of the rubric to use. Default: all.", type=int),
    option(
        "--verdicts HOW",
        "likelihood: the chances of the choices. samples: texts with reasons. Default: "
        "likelihood; samples with --repeats.",
        type=click.Choice(("likelihood", "samples")),
    ),
)


def plan_judging(
    judge: tuple[str, ...], how: Mapping[str, Any], choices: Mapping[str, Any]
) -> "JudgingPlan | None":
    """Return how the samples of an evaluation will be judged, checked before any is drawn.

    Args:
        judge: The judges that the user names.
        how: The rubric, the wordings and the kind of verdicts, by name; None if not set.
        choices: How the run's own model is loaded.

    Raises:
        TreegenError: the samples cannot be judged in this way.
    """
    from treegen.api.judge_plan import JudgingPlan
    from treegen.errors import InputError, arg

    unused = [name for name, value in how.items() if value is not None]
    plan = JudgingPlan.make(judge, **how, options=loading_of(choices)) if judge else None
    if plan is not None:
        plan.check()
    elif unused:
        raise InputError(
            f"{arg(unused[0] + '=')} is of no use without {arg('judge=')}; give {arg('judge=')} too"
        )
    return plan


def loading_of(choices: Mapping[str, Any]) -> dict[str, Any]:
    """Return how a judge is loaded, derived from how the run's own model is loaded."""
    # Others, such as the type of the weights, differ from model to model.
    return {name: choices[name] for name in _SHARED if name in choices}


def show_judged(judgings: "Judgings") -> None:
    """Print the judges' verdicts on a run."""
    from treegen.cli.terminal.render import echo, tell
    from treegen.common.formatting import safe_text

    for summary in judgings.summaries:
        for line in summary.notices:
            tell(line)
    echo(safe_text(str(judgings)))
