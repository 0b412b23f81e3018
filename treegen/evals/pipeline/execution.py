"""The steps that evaluations and search runs share: inspect the model, open and fill the runs."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from treegen import demo
from treegen.common.cores import set_threads
from treegen.common.lifetimes import Closeable
from treegen.errors import InputError, Message, RunError, TreegenError, arg
from treegen.evals.config.base import BaseSettings
from treegen.evals.identity import computed_on, run_settings
from treegen.evals.model import (
    ModelPrecision,
    check_machine,
    load_llm,
    load_model_info,
    resolve_precision,
    weights_fingerprint,
)
from treegen.evals.pipeline.listener import Listener, Stop
from treegen.model.options import EngineOptions
from treegen.runs import RunDir

if TYPE_CHECKING:
    from treegen.evals.job import AnyJob
    from treegen.evals.pipeline.targets import RunTarget
    from treegen.evals.progress.run_progress import RunProgress
    from treegen.llm.base import BaseLLM
    from treegen.llm.cluster.placement import Placement
    from treegen.model.model_info import ModelInfo
    from treegen.runs import RunInfo, RunSettings

_Job = TypeVar("_Job", bound="AnyJob")
_Run = TypeVar("_Run", bound=RunDir)
_Result = TypeVar("_Result")
_Prepared = TypeVar("_Prepared")
Before = Sequence[Callable[[], object]]
_MAX_LISTED_ROWS = 5
# Options that the fingerprint of the weights implies, or that were chosen for the loaded model.
_OPTIONS_OF_WEIGHTS = (
    "model",
    "revision",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "sharing",
    "tensor_parallel_size",
)


@dataclass(frozen=True, slots=True)
class RunWork(ABC, Generic[_Job, _Run, _Result]):
    """A job and its open run."""

    job: _Job
    run: _Run

    @property
    @abstractmethod
    def title(self) -> str:
        """The name shown with its progress."""

    @abstractmethod
    def steps(self, llm: "BaseLLM", stop: Stop) -> "Iterator[RunProgress]":
        """Draw what the run is missing.

        Args:
            llm: The model that samples.
            stop: Called at every step; if it returns a true value, the iteration ends.
        """

    def end(self, listener: Listener) -> None:
        """Do the remaining work after everything is drawn."""

    @abstractmethod
    def save_result(self, resume_hint: str) -> _Result:
        """Write the results and return the result of the run.

        Args:
            resume_hint: How to resume the run, for messages.
        """


@dataclass(slots=True)
class ModelLoader(Closeable):
    """The model of each run: one that is already loaded, or one loaded at a time by name."""

    llm: "BaseLLM | None" = None
    """A loaded model; it is used for all runs, and stays open."""
    placement: "Placement | None" = None
    """The placement of workers that load models."""
    keep_loaded: bool = False
    """Whether a model stays loaded after its runs; the code that sets it must then close the
    model."""
    threads: str | None = None
    """The CPU threads with which a resumed run was computed."""
    _loaded: "BaseLLM | None" = field(default=None, init=False)
    _options: EngineOptions | None = field(default=None, init=False)

    @property
    def on_workers(self) -> bool:
        """Whether samples are drawn in other processes."""
        from treegen.llm import LLM

        if self.llm is not None:
            return not isinstance(self.llm, LLM)
        return self.placement is not None

    def choices(self, chosen: "dict[str, Any]") -> dict[str, Any]:
        """Return a user's choices together with the engine options of the loaded model."""
        if self.llm is None:
            return chosen
        engine = self.llm.model_info.engine
        if callable(engine.speculate):  # a function changes no sample, and cannot be stored
            engine = replace(engine, speculate=None, draft_tokens=None)
        options = asdict(engine)
        for name in options:
            if name in chosen:
                raise InputError(
                    f"{arg(name + '=')} has no effect on a model that is already loaded; remove "
                    f"{arg(name + '=')}"
                )
        return {**chosen, **options}

    def load_model_info(self, engine: EngineOptions) -> "ModelInfo":
        """Return the properties of a model; raise an error if the machine cannot load it."""
        if self.llm is not None:
            return self.llm.model_info
        model_info = load_model_info(engine, self.placement)
        check_machine(engine, self.placement)
        return model_info

    def settings(self, job: "AnyJob", model_info: "ModelInfo | ModelPrecision") -> "RunSettings":
        """Return the settings that a job's run stores when it starts."""
        engine, loaded = job.settings.engine, self.llm
        if model_info.device_type == "cpu" and loaded is None and not self.on_workers:
            set_threads(self.threads)
        return run_settings(
            job,
            dtype=model_info.dtype,
            fingerprint=loaded.fingerprint if loaded is not None else weights_fingerprint(engine),
            device_type=model_info.device_type,
            quantization=model_info.quantization,
        )

    def settings_of_complete(self, job: "AnyJob", info: "RunInfo | None") -> "RunSettings":
        """Return the same as `settings` for a run that is complete.

        Args:
            job: The job of the run.
            info: The stored content of run.json. With it, treegen compares only the weights, reads
                nothing else, and does not import torch. With None, it resolves the model's
                precision.
        """
        engine = job.settings.engine
        if self.llm is not None:
            return self.settings(job, self.llm.model_info)
        if info is None:
            return self.settings(job, resolve_precision(engine, self.placement))
        model = info.identity["model"]
        return run_settings(
            job,
            dtype=model["dtype"],
            fingerprint=weights_fingerprint(engine),
            quantization=model.get("quantization"),
            computing=computed_on(info),
        )

    def get(
        self, item: RunWork[Any, Any, Any], listener: Listener, before: Before = ()
    ) -> "BaseLLM":
        """Return the model of a run, and load it if necessary.

        Args:
            item: The job and its open run.
            listener: Receives a message if a model is loaded.
            before: Functions that workers call before they load the model.
        """
        fingerprint = item.run.info.identity["model"]["fingerprint"]
        return self.load(item.job.settings.engine, fingerprint, listener, before)

    def load(
        self, engine: EngineOptions, fingerprint: str, listener: Listener, before: Before = ()
    ) -> "BaseLLM":
        """Return the loaded model, after loading it if necessary.

        Args:
            engine: The options of the model.
            fingerprint: The hash of its weights.
            listener: Receives the name of a model that is loaded.
            before: Functions that workers call before they load the model.

        Raises:
            ModelError: the model cannot be loaded.
        """
        if self.llm is not None:
            return self.llm
        if (
            self._loaded is None
            or self._options != engine
            or self._loaded.fingerprint != fingerprint
        ):
            self.close()  # frees its memory before the next model is loaded
            placement = f" on {_format_placement(self.placement)}" if self.placement else ""
            listener.loading(f"{engine.model}{placement}")
            self._loaded = load_llm(engine, fingerprint, self.placement, before)
            self._options = engine
        return self._loaded

    def get_loaded(self, engine: EngineOptions, fingerprint: str) -> "BaseLLM | None":
        """Return the loaded model if it has these options and weights, else None.

        Its dtypes may differ from the options, because they were chosen for this very model.
        """
        llm = self.llm if self.llm is not None else self._loaded
        if llm is None or self.on_workers or llm.fingerprint != fingerprint:
            return None
        loaded = llm.model_info.engine if self._options is None else self._options
        chosen = {name: getattr(loaded, name) for name in _OPTIONS_OF_WEIGHTS}
        return llm if replace(engine, **chosen) == loaded else None

    def __exit__(self, kind: object = None, *error: object) -> None:
        if kind is not None or not self.keep_loaded:
            self.close()

    def close(self) -> None:
        """Close the model that was loaded here, with its workers if there are any."""
        loaded, self._loaded = self._loaded, None
        if loaded is not None:
            loaded.close()


_Works: TypeAlias = "tuple[Sequence[RunWork[Any, Any, _Result]], Before]"


def _format_placement(placement: "Placement") -> str:
    """Describe the placement of workers, for people."""
    count = "all" if placement.count is None else f"{placement.count}"
    kind = "GPU" if placement.device == "cuda" else "CPU worker"
    where = f" of Ray at {placement.address}" if placement.address else ""
    return f"{count} {kind}{'' if placement.count == 1 else 's'}{where}"


def announce_demo_model(
    choices: Mapping[str, Any], settings: Sequence[BaseSettings], listener: Listener
) -> None:
    """Tell the listener that a bundled model is used, if the user named none.

    Args:
        choices: The user's choices, by name.
        settings: The settings of all runs.
        listener: Receives the message.
    """
    models = {str(run_settings.engine.model) for run_settings in settings}
    if "model" not in choices and models & demo.MODELS.keys():
        if "data" in choices or demo.AGENT in models:
            text = f"{demo.MODEL_NOTICE}; use {arg('model=')} for your own"
        else:
            text = f"{demo.NOTICE}; use {arg('model=')} and {arg('data=')} for your own"
        listener.tell(Message(text))


def tell_skipped(job: "AnyJob", listener: Listener) -> None:
    """Tell the listener which lines of the data cannot be run."""
    rows = job.data.skipped
    for row in rows[:_MAX_LISTED_ROWS]:
        listener.tell(f"skipped: {row}")
    if len(rows) > _MAX_LISTED_ROWS:
        listener.tell(
            f"skipped: {len(rows) - _MAX_LISTED_ROWS:,} more rows; results.json lists all of them"
        )


def prepare_runs(
    jobs: "Sequence[_Job]",
    models: ModelLoader,
    listener: Listener,
    prepare: "Callable[[_Job, ModelInfo], _Prepared | None]",
    targets: "Sequence[RunTarget[Any]]",
    complete_runs: "Sequence[tuple[_Job, RunInfo | None]]" = (),
) -> "tuple[list[RunSettings], list[_Prepared | None]]":
    """Check and prepare everything that needs no weights.

    Args:
        jobs: The jobs of the runs.
        models: Loads the models, or holds one that is loaded.
        listener: Receives notices about skipped data.
        prepare: Checks a job with the properties of its model, and prepares it.
        targets: The directories of all runs. The listener is told which ones are prepared, which
            may take minutes; they are created later, because run.json has hashes of the weights.
        complete_runs: Jobs of complete runs, which are not prepared. Each comes with the run's
            stored content of run.json, or None if the user changes an option of the model.

    Returns:
        The settings of each run, and each prepared job; None for a complete run.
    """
    settings, prepared = [], list["_Prepared | None"]()
    paths = [str(target.path) for target in targets if not target.is_complete]
    for job in jobs:
        tell_skipped(job, listener)
        infos = [info for other, info in complete_runs if other is job]
        if infos:
            settings.append(models.settings_of_complete(job, infos[0]))
            prepared.append(None)
            continue
        model_info = models.load_model_info(job.settings.engine)
        if paths:
            listener.tell(f"preparing {', '.join(paths)}: reading prompts and weights")
            paths = []
        prepared.append(prepare(job, model_info))
        settings.append(models.settings(job, model_info))
    return settings, prepared


def execute_runs(
    kind: type[_Run],
    targets: "Sequence[RunTarget[Any]]",
    run_settings: "Sequence[RunSettings]",
    make: "Callable[[Sequence[_Run], ExitStack], _Works[_Result]]",
    models: ModelLoader,
    listener: Listener,
    resume_hint: str,
    *,
    unit: str,
) -> list[_Result]:
    """Start or resume runs, draw what each is missing, and return their results.

    Args:
        kind: The class of run directories.
        targets: The directory of each run, and whether to resume it.
        run_settings: The settings of each run.
        make: Returns the work of the open runs, and the functions that each worker calls before it
            loads the model. What it puts on the stack is closed at the end.
        models: Loads the models, or holds one that is loaded.
        listener: Receives messages and progress.
        resume_hint: How to resume the runs, for messages.
        unit: The unit of a run's records in messages, such as "samples".
    """
    with ExitStack() as stack:
        runs = _open_runs(kind, targets, run_settings, stack, listener, unit)
        stack.enter_context(models)
        # It is entered before anything that writes in the run directories, so it exits after that.
        stack.enter_context(discard_on_error(runs, but=RunError))
        work, before = make(runs, stack)

        def describe_stored() -> str:
            done = sum(len(run.done) for run in runs)
            planned = sum(run.info.planned for run in runs)
            return f"{done:,} of {planned:,} {unit} are stored; {resume_hint}"

        try:
            for item in work:
                if item.run.missing > 0:
                    _fill(item, models, listener, before, runs, describe_stored)
            for item in work:
                item.end(listener)
            return [item.save_result(resume_hint) for item in work]
        except BaseException as stopped:
            if not isinstance(stopped, Exception):
                stopped.add_note(describe_stored())
            raise


def _open_runs(
    kind: type[_Run],
    targets: "Sequence[RunTarget[Any]]",
    run_settings: "Sequence[RunSettings]",
    stack: ExitStack,
    listener: Listener,
    unit: str,
) -> list[_Run]:
    runs: list[_Run] = []
    with discard_on_error(runs):
        for target, settings in zip(targets, run_settings, strict=True):
            path = target.path
            run: _Run = (
                kind.resume(path, settings) if target.resume else kind.create(path, settings)
            )
            stack.enter_context(run)
            runs.append(run)
            for line in run.notices:
                listener.warn(line)
            had = f", {len(run.done):,} of {run.info.planned:,} {unit} done"
            listener.tell(f"run directory: {path}{had if target.resume else ''}")
    return runs


def _fill(
    item: RunWork[Any, Any, Any],
    models: ModelLoader,
    listener: Listener,
    before: Before,
    runs: Sequence[RunDir],
    describe_stored: Callable[[], str],
) -> None:
    """Draw what a run is missing. The model is loaded only for that."""
    llm = models.get(item, listener, before)
    with listener.poll_interrupts() as stop:
        try:
            listener.track(item.steps(llm, stop), item.title)
        except RunError:
            raise  # the message says what is stored, and how to continue
        except TreegenError as error:
            if _are_all_new(runs):
                raise  # there is nothing to continue
            raise type(error)(f"{error.message.marked}; {describe_stored()}") from error


@contextmanager
def discard_on_error(
    runs: "Sequence[RunDir]", *, but: type[Exception] | None = None
) -> Iterator[None]:
    """Remove the runs on an error if all of them are new, so that the same call can be repeated.

    Args:
        runs: The open runs.
        but: An error after which the runs are kept, to be resumed. Interrupts always keep them.
    """
    try:
        yield
    except Exception as error:
        if _are_all_new(runs) and not (but and isinstance(error, but)):
            for run in reversed(runs):
                run.discard()
        raise


def _are_all_new(runs: "Sequence[RunDir]") -> bool:
    """Return whether all runs were created by this call and have no record yet."""
    return all(run.is_new for run in runs)
