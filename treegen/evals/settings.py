"""What one evaluation was asked for: a task, its data, a model, and how to sample.

Settings travel as a flat mapping of names to values: what a user gives, and what a run directory
holds. `settle` makes one whole out of them, `identity` and `free` take it apart again for run.json.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Final

import treegen
from treegen import demo
from treegen.errors import InputError, RunError
from treegen.evals.arguments import configured
from treegen.evals.registry import get_task
from treegen.evals.selection import did_you_mean
from treegen.evals.task import TaskDefaults, TaskOptions
from treegen.options import EngineOptions
from treegen.params import SamplingParams

if TYPE_CHECKING:
    from treegen.runs import RunInfo

SAMPLING: Final = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "max_tokens",
    "stop",
    "stop_token_ids",
    "ignore_eos",
    "seed",
)
# Tasks may set these; run.json has them where they change a sample.
_OF_TASKS: Final = ("min_tokens", "logit_bias")
# Of two that exclude each other, the one that is given puts out one that was stored.
_EXCLUSIVE: Final = (("limit", "ids"), ("fewshot_file", "fewshot_data"))
# Paths are stored in full, so that a run can be resumed and scored from any directory. A bare word
# in the second group may be a name that the task knows, such as train.
_PATHS: Final = ("model", "fewshot_file")
_PATHS_OR_NAMES: Final = ("data", "fewshot_data")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSettings:
    """Everything one evaluation was asked for, no default left open.

    task: a name, or path/to/file.py:Class. fewshot_as_multiturn: in chat, a user's and an
    assistant's turn for each solved example, else one user's turn for all. pass_ks, maj_ks: None
    picks them from num_samples.
    score: judge the samples. log_tokens: store the token ids of each sample as well.
    """

    task: str
    options: TaskOptions
    num_samples: int
    sampling: SamplingParams
    engine: EngineOptions
    apply_chat_template: bool = False
    fewshot_as_multiturn: bool = False
    system_instruction: str | None = None
    pass_ks: tuple[int, ...] | None = None
    maj_ks: tuple[int, ...] | None = None
    score: bool = True
    log_tokens: bool = False

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise InputError(f"--n-samples must be at least 1, got {self.num_samples}")
        if self.fewshot_as_multiturn and not self.apply_chat_template:
            raise InputError("fewshot-as-multiturn needs chat: give --apply-chat-template too")
        for name, ks in (("k", self.pass_ks), ("maj", self.maj_ks)):
            for k in ks or ():
                if not 1 <= k <= self.num_samples:
                    raise InputError(
                        f"--{name} {k} is not possible with {self.num_samples} samples per "
                        f"problem; choose from 1 to {self.num_samples}, or draw more (--n-samples)"
                    )


def merged(asked: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a user's choices over stored ones, paths in full."""
    given: dict[str, Any] = dict(stored or {})
    for pair in _EXCLUSIVE:
        if any(name in asked for name in pair):
            for name in pair:
                given.pop(name, None)
    for name, value in asked.items():
        is_name = name in _PATHS_OR_NAMES and str(value).isidentifier()
        is_name = is_name or (name == "model" and value == demo.NAME)
        is_path = name in (*_PATHS, *_PATHS_OR_NAMES) and not is_name
        given[name] = _absolute(value) if is_path else value
    if "extra" in asked:
        given["extra"] = {**(stored or {}).get("extra", {}), **asked["extra"]}
    return given


def settle(asked: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> EvalSettings:
    """Return the settings that a user's choices come to.

    asked: what the user gave, by name; what is absent was not given. stored: the choices of the
    run that is resumed or scored, which stand where the user gave nothing. Where neither says
    anything, the task's own defaults hold.
    """
    given = merged(asked, stored)
    if not given.get("task"):
        raise InputError("no task is given; `treegen tasks` lists them")
    task = str(given.pop("task"))
    defaults = configured(get_task(task), given.get("extra", {})).defaults
    chat = given.get("apply_chat_template", False)
    given.setdefault("fewshot_as_multiturn", chat)
    if "system_instruction" in given and given["system_instruction"] == "":
        given["system_instruction"] = None
    sampling = {name: given.pop(name) for name in (*SAMPLING, *_OF_TASKS) if name in given}
    if stored_bias := sampling.get("logit_bias"):  # JSON has text for keys
        sampling["logit_bias"] = {int(token): bias for token, bias in stored_bias.items()}
    seed = {"seed": sampling["seed"]} if "seed" in sampling else {}
    for name in ("stop", "stop_token_ids"):
        if name in sampling and not isinstance(sampling[name], str):
            sampling[name] = tuple(sampling[name])
    for name in ("pass_ks", "maj_ks"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    drawn = default_sampling(defaults, chat=chat)
    settings = EvalSettings(
        task=absolute_task(task),
        num_samples=given.pop("num_samples", defaults.num_samples),
        sampling=replace(drawn, **{"seed": drawn.seed or 0, **sampling}),
        options=TaskOptions(**take_fields(given, TaskOptions), **seed),
        engine=engine_options(given),
        **take_fields(given, EvalSettings),
    )
    if given:
        raise InputError(f"there is no setting {min(given)!r}{did_you_mean(min(given), _names())}")
    return settings


def default_sampling(defaults: TaskDefaults, *, chat: bool) -> SamplingParams:
    """Return how a task is sampled by default.

    A chat model ends its turn itself, and blank lines are part of it: they are no stop there.
    """
    sampling = defaults.sampling
    if not chat:
        return sampling
    return replace(sampling, stop=tuple(stop for stop in sampling.stops if stop.strip()))


def identity(settings: EvalSettings) -> dict[str, Any]:
    """Return the choices that change a sample, as run.json groups them."""
    sampling = {name: getattr(settings.sampling, name) for name in SAMPLING}
    if settings.sampling.min_tokens:
        sampling["min_tokens"] = settings.sampling.min_tokens
    if biases := settings.sampling.biases:
        sampling["logit_bias"] = {str(token): bias for token, bias in biases}
    return {
        "treegen": treegen.__version__,
        "num_samples": settings.num_samples,
        "sampling": {**sampling, "stop": settings.sampling.stops},
        "prompt": {
            "apply_chat_template": settings.apply_chat_template,
            "system_instruction": settings.system_instruction,
            # Absent where it is not so, as in runs from before there was a choice.
            **({"fewshot_as_multiturn": True} if settings.fewshot_as_multiturn else {}),
        },
    }


def free(settings: EvalSettings) -> dict[str, Any]:
    """Return the choices that change no sample, or only by way of what identity has hashes of."""
    options = asdict(settings.options)
    del options["seed"]
    return {
        "task": settings.task,
        **options,
        **asdict(settings.engine),
        "pass_ks": settings.pass_ks,
        "maj_ks": settings.maj_ks,
        "score": settings.score,
        "log_tokens": settings.log_tokens,
    }


def stored_choices(info: "RunInfo") -> dict[str, Any]:
    """Return the choices that a run was last begun or resumed with, by name.

    Raises:
        RunError: the run is of something else than an evaluation.
    """
    latest = info.resumes[-1]["free"] if info.resumes else info.free
    try:
        return {
            **latest,
            "fewshot_as_multiturn": False,
            **info.identity["sampling"],
            **info.identity["prompt"],
            "num_samples": info.identity["num_samples"],
        }
    except (KeyError, TypeError):
        raise RunError("its run.json is not that of a run of `treegen eval`") from None


def engine_options(given: dict[str, Any]) -> EngineOptions:
    """Move what is said of the model out of `given`; raise InputError where none is named."""
    if not given.get("model"):
        raise InputError(
            "no model is given; name one with --model: a directory made by save_pretrained, or a "
            "hub name"
        )
    return EngineOptions(**take_fields(given, EngineOptions))


def take_fields(given: dict[str, Any], kind: type) -> dict[str, Any]:
    """Move out of `given` what is a field of the dataclass `kind`."""
    return {name: given.pop(name) for name in _fields(kind) if name in given}


def _fields(kind: Any) -> list[str]:
    return [field.name for field in fields(kind)]


def _names() -> Iterable[str]:
    kinds = (EvalSettings, TaskOptions, EngineOptions, SamplingParams)
    return [name for kind in kinds for name in _fields(kind)]


def _absolute(value: Any) -> Any:
    # Names of hubs and data sets stay as they are.
    return os.path.abspath(value) if isinstance(value, str) and os.path.exists(value) else value


def absolute_task(task: str) -> str:
    path, colon, class_name = task.rpartition(":")
    return f"{_absolute(path)}:{class_name}" if colon else task
