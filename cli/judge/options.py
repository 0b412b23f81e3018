"""The options of judges, which `treegen judge` and `treegen eval` share, and what they do there."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from treegen.cli.typed.options import joined

if TYPE_CHECKING:
    from treegen.cli.terminal.progress import Terminal
    from treegen.grading.models import JudgeModels
    from treegen.report.judged.judging import Judgings

# What a judge has of how the model of the run is loaded.
_SHARED = ("device", "memory", "max_rows", "reproducible", "eager", "trust_remote_code")
JUDGE = joined(
    click.option("--judge", "judge", multiple=True, metavar="DIR|NAME", help="A model that judges; "
                 "several are a jury. Default: judgements that are stored, read again."),
    click.option("--rubric", metavar="NAME|FILE", help="correctness, rating, pairwise, simpleqa, "
                 "or a .yaml or .jinja file. Default: that of the task, or correctness; of pairs, "
                 "pairwise."),
    click.option("--wordings", type=int, metavar="N", help="Wordings of the rubric to use. "
                 "Default: all."),
    click.option("--verdicts", type=click.Choice(("likelihood", "samples")), metavar="HOW",
                 help="likelihood: the chances of the choices. samples: texts with reasons. "
                 "Default: likelihood; samples with --repeats."),
)  # fmt: skip


def check_judge(
    judge: tuple[str, ...], how: Mapping[str, Any], asked: Mapping[str, Any]
) -> None:  # fmt: skip
    """Refuse what `judge_with` would, before anything is sampled."""
    from treegen.errors import InputError
    from treegen.report.judged.judging import check_judges

    given = [name for name, value in how.items() if value is not None]
    if judge:
        check_judges(judge, **how, options=_options(asked))
    elif given:
        raise InputError(f"{given[0]}= is of no use without judge=; give judge= too")


def judge_with(
    run: Path, judge: tuple[str, ...], how: Mapping[str, Any], asked: Mapping[str, Any],
    models: "JudgeModels", terminal: "Terminal",
) -> "Judgings":  # fmt: skip
    """Judge a run that has just been drawn. asked: how its own model was loaded."""
    from treegen.report.judged import judging

    return judging.judge(
        run, judge=judge, listener=terminal, follow=terminal.count, options=_options(asked),
        models=models, allow_task_code=True, **how,
    )  # fmt: skip


def _options(asked: Mapping[str, Any]) -> dict[str, Any]:
    # The type of one model's weights is not that of another's.
    return {name: asked[name] for name in _SHARED if name in asked}


def show_judged(found: "Judgings", *, quiet: bool) -> None:
    """Print what models say of a run."""
    from treegen.cli.terminal.render import echo, notice
    from treegen.common.formats import safe_text

    if quiet:
        return
    for line in (line for summary in found.summaries for line in summary.notices):
        notice(line)
    echo(safe_text(str(found)))
