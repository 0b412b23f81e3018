"""The steps that evaluations and runs of searches share: look at the model, open and fill runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from treegen import demo
from treegen.common.closing import Closing
from treegen.errors import InputError, RunError, TreegenError
from treegen.evals.asked.given import RunChoices
from treegen.evals.identity import run_settings
from treegen.evals.model import check_machine, load_llm, look_at_model, weights_fingerprint
from treegen.evals.running.discarding import all_new, discarding
from treegen.evals.running.listener import Listener, Stop
from treegen.options import EngineOptions
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.cluster.places import Places
    from treegen.evals.course.progress import Progress
    from treegen.evals.job import AnyJob
    from treegen.evals.running.destinations import Destination
    from treegen.llm.calls import Calls
    from treegen.model.facts import ModelFacts
    from treegen.runs import RunSettings

_Job = TypeVar("_Job", bound="AnyJob")
_Run = TypeVar("_Run", bound=RunDir)
_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Work(ABC, Generic[_Job, _Run]):
    """One job and its open run."""

    job: _Job
    run: _Run

    @property
    @abstractmethod
    def title(self) -> str:
        """The name that its progress shows."""

    @abstractmethod
    def steps(self, llm: "Calls", stop: Stop) -> "Iterator[Progress]":
        """Draw what the run lacks. stop: polled; once it is true, the iteration ends."""


@dataclass(slots=True)
class Models(Closing):
    """The model of each run: one that is loaded already, or one at a time, by its name.

    given: it is used for all runs, and stays open. places: of workers that load models.
    """

    given: "Calls | None" = None
    places: "Places | None" = None
    _loaded: "Calls | None" = field(default=None, init=False)
    _options: EngineOptions | None = field(default=None, init=False)

    @property
    def on_workers(self) -> bool:
        """Whether samples are drawn in other processes than this one."""
        from treegen.llm import LLM

        if self.given is not None:
            return not isinstance(self.given, LLM)
        return self.places is not None

    def choices(self, asked: "dict[str, Any]") -> dict[str, Any]:
        """Return a user's choices, with those that the loaded model was made with."""
        if self.given is None:
            return asked
        engine = self.given.facts.engine
        if callable(engine.speculate):  # it changes no sample, and cannot be stored
            engine = replace(engine, speculate=None, draft_tokens=None)
        own = asdict(engine)
        for name in own:
            if name in asked:
                raise InputError(f"{name}= is for loading a model, and this one is loaded")
        return {**asked, **own}

    def facts(self, engine: EngineOptions) -> "ModelFacts":
        """Return what is known of a model before it is loaded, if the machine can load it."""
        if self.given is not None:
            return self.given.facts
        found = look_at_model(engine, self.places)
        check_machine(engine, self.places)
        return found

    def settings(self, job: "AnyJob", facts: "ModelFacts") -> "RunSettings":
        """Return what a job's run stores when it begins."""
        engine, given = job.settings.engine, self.given
        return run_settings(
            job,
            dtype=facts.dtype,
            fingerprint=given.fingerprint if given is not None else weights_fingerprint(engine),
            device_type=facts.device_type,
            quantization=facts.quantization,
        )

    def get(self, item: Work[Any, Any], listener: Listener, before: Sequence[Any] = ()) -> "Calls":
        """Load what an item needs, unless it is there. before: what workers call first."""
        if self.given is not None:
            return self.given
        engine = item.job.settings.engine
        if self._loaded is None or self._options != engine:
            self.close()  # gives its memory back before the next one is loaded
            many = f" on {_told(self.places)}" if self.places else ""
            listener.loading(f"{engine.model}{many}")
            weights = item.run.info.identity["model"]["fingerprint"]
            self._loaded = load_llm(engine, weights, self.places, before)
            self._options = engine
        return self._loaded

    def close(self) -> None:
        """End the workers, if there are some."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


def _told(places: "Places") -> str:
    """Return where workers are, for people."""
    count = "all" if places.count is None else f"{places.count}"
    kind = "GPU" if places.device == "cuda" else "CPU worker"
    where = f" of Ray at {places.address}" if places.address else ""
    return f"{count} {kind}{'' if places.count == 1 else 's'}{where}"


def tell_demo(asked: Mapping[str, Any], settings: Sequence[RunChoices], listener: Listener) -> None:
    """Say that the bundled model is used, if the user named none."""
    if "model" not in asked and any(each.engine.model == demo.NAME for each in settings):
        listener.tell(demo.MODEL_NOTICE if "data" in asked else demo.NOTICE)


def tell_skipped(job: "AnyJob", listener: Listener) -> None:
    """Say which lines of the data cannot be run."""
    rows = job.data.skipped
    for row in rows[:_SHOWN]:
        listener.tell(f"skipped: {row}")
    if len(rows) > _SHOWN:
        listener.tell(f"skipped: {len(rows) - _SHOWN:,} more rows; results.json lists all of them")


def open_runs(
    kind: type[_Run],
    found: "Iterable[tuple[Destination[Any], RunSettings]]",
    stack: ExitStack,
    listener: Listener,
    *,
    unit: str,
) -> list[_Run]:
    """Begin or continue runs, which `stack` closes. unit: what they have, such as samples."""
    runs: list[_Run] = []
    with discarding(runs):
        for target, asked in found:
            path = target.path
            run: _Run = kind.resume(path, asked) if target.resume else kind.create(path, asked)
            stack.enter_context(run)
            runs.append(run)
            for line in run.notices:
                listener.warn(line)
            had = f", {len(run.done):,} of {run.info.planned:,} {unit} done"
            listener.tell(f"run directory: {path}{had if target.resume else ''}")
    return runs


def fill(
    work: Sequence[Work[Any, Any]],
    models: Models,
    listener: Listener,
    kept: Callable[[], str],
    before: Sequence[Callable[[], object]] = (),
) -> None:
    """Draw what each run lacks. The model is loaded only if something is to be drawn.

    kept: gives the end of error messages: what is stored, and how to go on.
    before: what each worker calls before it loads the model.
    """
    for item in work:
        if item.run.missing <= 0:
            continue
        llm = models.get(item, listener, before)
        with listener.working() as stop:
            try:
                listener.follow(item.steps(llm, stop), item.title)
            except RunError:
                raise  # the message says what is stored, and how to go on
            except TreegenError as error:
                if all_new([each.run for each in work]):
                    raise  # there is nothing to continue
                raise type(error)(f"{error}; {kept()}") from error


def kept_of(work: Sequence[Work[Any, Any]], unit: str) -> str:
    """Return a text on how much of all runs is stored."""
    done = sum(len(item.run.done) for item in work)
    planned = sum(item.run.info.planned for item in work)
    return f"{done:,} of {planned:,} {unit} are kept"
