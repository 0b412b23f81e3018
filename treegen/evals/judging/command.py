"""The command that continues stored judge runs."""

import shlex
from collections.abc import Iterable
from pathlib import Path

from treegen.evals.judging.rubric import BUILT_IN, load_rubric
from treegen.evals.judging.settings import JudgeRun, JudgeSettings


def continue_commands(path: Path, judgings: Iterable[JudgeRun]) -> list[str]:
    """Return the commands that add the missing judgements, one for each jury.

    Args:
        path: Directory of the run.
        judgings: The judge runs with missing judgements.
    """
    judges: dict[str, list[str]] = {}
    for judging in judgings:
        judges.setdefault(shlex.join(_list_flags(judging.settings)), []).append(judging.judge)
    return [
        f"treegen judge {shlex.quote(str(path))} "
        + " ".join(f"--judge {shlex.quote(name)}" for name in names)
        + f" {flags}"
        for flags, names in judges.items()
    ]


def _list_flags(settings: JudgeSettings) -> list[str]:
    """Return the flags of `treegen judge` that give these settings."""
    rubric = settings.rubric
    is_built_in = rubric.name in BUILT_IN and rubric == load_rubric(rubric.name)
    flags = ["--rubric", rubric.name if is_built_in else f"FILE_OF_{rubric.name}"]
    if settings.wordings < len(rubric.wordings):
        flags += ["--wordings", str(settings.wordings)]
    if settings.chat is not None:
        flags.append("--apply-chat-template" if settings.chat else "--no-chat-template")
    if settings.verdicts == "likelihood":
        return flags
    flags += ["--verdicts", settings.verdicts]
    if settings.repeats > 1:
        flags += ["--repeats", str(settings.repeats)]
    if settings.decided:
        flags += ["--stop-when", "decided"]
    fields = JudgeSettings.__dataclass_fields__
    for name in ("temperature", "max_tokens", "seed"):
        if (value := getattr(settings, name)) != fields[name].default:
            flags += [f"--{name.replace('_', '-')}", str(value)]
    return flags
