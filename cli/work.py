"""The steps that `treegen eval` and `treegen search` share: check, open runs, load, fill."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from treegen.cli.interrupts import Interrupted, received

if TYPE_CHECKING:
    from treegen.cli.destinations import Destination
    from treegen.cluster.places import Places
    from treegen.evals.course.progress import Progress
    from treegen.evals.job import AnyJob
    from treegen.evals.model import ModelFacts
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


def look_at(job: "AnyJob", places: "Places | None" = None, *, quiet: bool) -> "ModelFacts":
    """Check that the machine can run a job; returns the facts about its model, without weights.

    places: of workers. Each checks its own machine.
    """
    from treegen.cli.render import skipped_rows
    from treegen.evals.model import check_machine, look_at_model

    if not quiet:
        skipped_rows(job.data.skipped)
    facts = look_at_model(job.settings.engine, places)
    check_machine(job.settings.engine, places)
    return facts


def wanted(job: "AnyJob", facts: "ModelFacts", flags: Mapping[str, str]) -> "RunSettings":
    """Return the settings of a job's run. flags: how the user sets each field."""
    from treegen.evals.identity import run_settings
    from treegen.evals.model import weights_fingerprint

    fingerprint = weights_fingerprint(job.settings.engine)
    return run_settings(
        job, dtype=facts.dtype, fingerprint=fingerprint, flags=flags, device_type=facts.device_type,
        quantization=facts.quantization,
    )  # fmt: skip


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
    places: "Places | None" = None,
    before: Sequence[Callable[[], object]] = (),
    quiet: bool,
) -> None:
    """Draw what each run lacks. The model is loaded only if something is to be drawn.

    steps: draws what one item lacks; it is given a function to poll for a signal.
    kept: gives the end of error messages: what is stored, and how to go on.
    places: of workers that draw.
    before: what each worker calls before it loads the model.
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
            self._llm = load(engine, weights, self._places, self._before)
            self._engine = engine
            self._stack.callback(self._llm.close)
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
    from treegen.cli.progress import show_progress
    from treegen.errors import RunError, TreegenError
    from treegen.runs import graceful_signals

    for item in work:
        if item.run.missing <= 0:
            continue
        llm = models.get(item)
        with graceful_signals() as graceful:
            stop = either(received, graceful)
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


def load(
    engine: "EngineOptions",
    fingerprint: str,
    places: "Places | None" = None,
    before: Sequence[Callable[[], object]] = (),
) -> "LLM":
    """Load a model, or workers that have it, without what transformers says meanwhile."""
    from transformers.utils import logging

    from treegen.evals.model import load_llm

    # Progress bars and advice of transformers would mix with our own lines.
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    if places is None:
        return load_llm(engine, fingerprint)
    return load_llm(engine, fingerprint, places, before)


def either(*flags: Stop) -> Stop:
    """Return a function that gives the signal that one of several has received."""
    return lambda: next((signum for flag in flags if (signum := flag())), None)
