"""What `treegen eval` and `treegen search` do alike: check, open runs, load a model, fill runs."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from treegen.cli.interrupts import Interrupted, received
from treegen.closing import Closing

if TYPE_CHECKING:
    from treegen.cli.destinations import Destination
    from treegen.cluster.places import Places
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
        """What stands before its progress."""
        return self.job.task.name


_Work = TypeVar("_Work", bound=Work)
_Run = TypeVar("_Run", bound="RunDir")
Stop = Callable[[], int | None]


def look_at(job: "AnyJob", places: "Places | None" = None, *, quiet: bool) -> "ModelFacts":
    """Check a job's machine and return what its model is like, without its weights.

    places: of workers, which check their own.
    """
    from treegen.cli.render import skipped_rows
    from treegen.evals.job import check_machine, look_at_model

    if not quiet:
        skipped_rows(job.data.skipped)
    facts = look_at_model(job.settings.engine, places)
    check_machine(job.settings.engine, places)
    return facts


def wanted(job: "AnyJob", facts: "ModelFacts", flags: Mapping[str, str]) -> "RunSettings":
    """Return what a job's run is asked for. flags: how the user sets each field."""
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
    """Begin or continue runs, which `stack` closes. unit: what they hold, such as samples."""
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
    places: "Places | None" = None,
    before: Sequence[Callable[[], object]] = (),
    quiet: bool,
) -> None:
    """Draw what each run lacks; the model is loaded once if there is anything to draw.

    steps: draws one item's, polling what it is given. kept: what errors end with. places: of
    workers that draw, and before: what each calls before it loads the model.
    """
    with ExitStack() as stack:
        _fill(work, steps, kept, _Models(places, before, stack, quiet=quiet), quiet=quiet)


class _Models:
    """The model that is loaded, one at a time."""

    def __init__(
        self,
        places: "Places | None",
        before: Sequence[Callable[[], object]],
        stack: ExitStack,
        *,
        quiet: bool,
    ) -> None:
        """None is. stack: closes the last one, and the workers that have it."""
        self._places, self._before, self._stack, self._quiet = places, before, stack, quiet
        self._llm: LLM | None = None
        self._engine: EngineOptions | None = None

    def get(self, item: Work) -> "LLM":
        """Load what an item needs, unless it is there."""
        from treegen.cli.render import notice

        engine = item.job.settings.engine
        if self._llm is None or self._engine != engine:
            self._llm = None  # gives its memory back before the next one is loaded
            self._stack.close()
            if not self._quiet:
                many = f" on {_told(self._places)}" if self._places else ""
                notice(f"loading {engine.model}{many}")
            weights = item.run.info.identity["model"]["fingerprint"]
            self._llm = _load(engine, weights, self._places, self._before)
            self._engine = engine
            if isinstance(self._llm, Closing):
                self._stack.enter_context(self._llm)
        return self._llm


def _told(places: "Places") -> str:
    """Return where workers are, for people."""
    count = "all" if places.count is None else f"{places.count}"
    kind = "GPU" if places.device == "cuda" else "CPU worker"
    where = f" of Ray at {places.address}" if places.address else ""
    return f"{count} {kind}{'' if places.count == 1 else 's'}{where}"


def _fill(
    work: Sequence[_Work],
    steps: "Callable[[_Work, LLM, Stop], Iterator[Progress]]",
    kept: Callable[[], str],
    models: _Models,
    *,
    quiet: bool,
) -> None:
    from treegen.cli.discarding import all_new
    from treegen.cli.progress import draw
    from treegen.errors import RunError, TreegenError
    from treegen.runs import graceful_signals

    for item in work:
        if item.run.missing <= 0:
            continue
        llm = models.get(item)
        with graceful_signals() as graceful:
            stop = _either(received, graceful)
            try:
                draw(steps(item, llm, stop), item.title, quiet=quiet)
            except RunError:
                raise  # says itself what is kept, and how to go on
            except TreegenError as error:
                if all_new([each.run for each in work]):
                    raise  # there is nothing to continue
                raise type(error)(f"{error}; {kept()}") from error
            if signum := stop():
                raise Interrupted(signum)


def kept_of(work: Sequence[Work], unit: str) -> str:
    """Return how much of all runs is stored."""
    done = sum(len(item.run.done) for item in work)
    planned = sum(item.run.info.planned for item in work)
    return f"{done:,} of {planned:,} {unit} are kept"


def _load(
    engine: "EngineOptions",
    fingerprint: str,
    places: "Places | None",
    before: Sequence[Callable[[], object]],
) -> "LLM":
    from transformers.utils import logging

    from treegen.evals.job import load_llm

    # transformers' bars and advice would stand between ours.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if places is None:
        return load_llm(engine, fingerprint)
    return load_llm(engine, fingerprint, places, before)


def _either(*flags: Stop) -> Stop:
    return lambda: next((signum for flag in flags if (signum := flag())), None)
