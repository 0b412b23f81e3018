"""The steps that `treegen eval` and `treegen search` share: check, open runs, load, fill."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from treegen.cli.interrupts import Interrupted, received

if TYPE_CHECKING:
    from treegen.cli.destinations import Destination
    from treegen.evals.job import AnyJob, ModelFacts
    from treegen.evals.progress import Progress
    from treegen.llm import LLM
    from treegen.options import EngineOptions
    from treegen.runs import RunDir, RunSettings


@dataclass(frozen=True, slots=True)
class Work:
    """One job and its open run."""

    job: "AnyJob"
    run: "RunDir"

    @property
    def title(self) -> str:
        """The name that its progress shows."""
        return self.job.task.name


_Work = TypeVar("_Work", bound=Work)
_Run = TypeVar("_Run", bound="RunDir")
Stop = Callable[[], int | None]


def look_at(job: "AnyJob", *, quiet: bool) -> "ModelFacts":
    """Check that the machine can run a job; returns the facts about its model, without weights."""
    from treegen.cli.render import skipped_rows
    from treegen.evals.job import check_machine, look_at_model

    if not quiet:
        skipped_rows(job.data.skipped)
    facts = look_at_model(job.settings.engine)
    check_machine(job.settings.engine)
    return facts


def wanted(job: "AnyJob", facts: "ModelFacts", flags: Mapping[str, str]) -> "RunSettings":
    """Return the settings of a job's run. flags: how the user sets each field."""
    from treegen.evals.job import run_settings, weights_fingerprint

    fingerprint = weights_fingerprint(job.settings.engine)
    return run_settings(job, dtype=facts.dtype, fingerprint=fingerprint, flags=flags)


def open_runs(
    kind: type[_Run],
    found: "Iterable[tuple[Destination[Any], RunSettings]]",
    stack: ExitStack,
    *,
    unit: str,
    quiet: bool,
) -> list[_Run]:
    """Begin or continue runs, which `stack` closes. unit: what they have, such as samples."""
    from treegen.cli.discarding import discarding
    from treegen.cli.render import notice

    runs: list[_Run] = []
    with discarding(runs):
        for target, asked in found:
            path = target.path
            run: _Run = kind.resume(path, asked) if target.resume else kind.create(path, asked)
            stack.enter_context(run)
            runs.append(run)
            for line in run.notices:
                notice(line)
            if not quiet:
                had = f", {len(run.done):,} of {run.info.planned:,} {unit} done"
                notice(f"run directory: {path}{had if target.resume else ''}")
    return runs


def fill(
    work: Sequence[_Work],
    steps: "Callable[[_Work, LLM, Stop], Iterator[Progress]]",
    kept: Callable[[], str],
    *,
    quiet: bool,
) -> None:
    """Draw what each run lacks. The model is loaded only if something is to be drawn.

    steps: draws what one item lacks; it is given a function to poll for a signal.
    kept: gives the end of error messages: what is stored, and how to go on.
    """
    from treegen.cli.discarding import all_new
    from treegen.cli.progress import show_progress
    from treegen.cli.render import notice
    from treegen.errors import RunError, TreegenError
    from treegen.runs import graceful_signals

    llm: LLM | None = None
    loaded: EngineOptions | None = None
    for item in work:
        engine = item.job.settings.engine
        if item.run.missing <= 0:
            continue
        if llm is None or loaded != engine:
            llm = None  # its memory is free before the next model is loaded
            if not quiet:
                notice(f"loading {engine.model}")
            llm, loaded = _load(engine, item.run.info.identity["model"]["fingerprint"]), engine
        with graceful_signals() as graceful:
            stop = _either(received, graceful)
            try:
                show_progress(steps(item, llm, stop), item.title, quiet=quiet)
            except RunError:
                raise  # the message says what is stored, and how to go on
            except TreegenError as error:
                if all_new([each.run for each in work]):
                    raise  # there is nothing to continue
                raise type(error)(f"{error}; {kept()}") from error
            if signum := stop():
                raise Interrupted(signum)


def kept_of(work: Sequence[Work], unit: str) -> str:
    """Return a text on how much of all runs is stored."""
    done = sum(len(item.run.done) for item in work)
    planned = sum(item.run.info.planned for item in work)
    return f"{done:,} of {planned:,} {unit} are kept"


def _load(engine: "EngineOptions", fingerprint: str) -> "LLM":
    from transformers.utils import logging

    from treegen.evals.job import load_llm

    # Progress bars and advice of transformers would mix with our own lines.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return load_llm(engine, fingerprint)


def _either(*flags: Stop) -> Stop:
    return lambda: next((signum for flag in flags if (signum := flag())), None)
