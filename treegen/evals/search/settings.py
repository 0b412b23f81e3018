"""Settings of a search run: a task, a method, a budget, and how to sample."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from treegen.common.checks import check_int
from treegen.common.formatting import parse_bytes
from treegen.common.params import PENALTIES, SamplingParams
from treegen.common.spelling import did_you_mean
from treegen.errors import InputError, arg
from treegen.evals.arguments import check_verifier_settings
from treegen.evals.config.base import (
    ALLOW_TASK_CODE,
    BaseSettings,
    absolute,
    build_settings,
    last_choices,
    merge_choices,
    select,
)
from treegen.evals.config.type_checks import Count
from treegen.evals.registry import get_task_name
from treegen.evals.search.agent_task import AgentTask
from treegen.evals.search.custom_method import (
    absolute_method,
    find_method,
    is_custom_method,
    read_setting_names,
    short_name,
)
from treegen.evals.search.method_types import (
    CHOOSE,
    EVALUATE,
    PROPOSE,
    REWARD,
    TreeSettings,
    read_values,
)
from treegen.evals.search.methods import METHODS, explain_unread
from treegen.evals.search.task import SearchDefaults, SearchTask, get_search_task
from treegen.search.budget import Budget

if TYPE_CHECKING:
    from treegen.runs import RunInfo

_SAMPLING_NAMES: Final = ("temperature", "top_p", "top_k", "min_p", "seed")
# Values of these settings in runs of versions without them. run.json leaves these values out.
_OLD_VALUES: Final[dict[str, Any]] = {
    "rollouts": 0,
    "choose": "best",
    "arguments": {},
    "source": None,
    "repeats": 1,
    "verifier_args": {},
    "environment": None,
    "forces_calls": False,
}
_AGENT_SETTINGS: Final = ("environment", "forces_calls")


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchSettings(BaseSettings, TreeSettings):
    """All settings of a search run; every default is filled in."""

    COMPUTED: ClassVar = ("step", "solution")
    CHOICES: ClassVar = (
        *_SAMPLING_NAMES,
        *PENALTIES,
        "max_tokens",
        "step_tokens",
        "also_arguments",
    )
    FREE: ClassVar = ("concurrency", "place", "verifier_memory", "max_live")
    PACE: ClassVar = ("concurrency", "verifier_memory", "max_live")

    method: str
    """One of METHODS, or the last part of path/to/file.py:function."""
    budget: Budget
    """The budget of each problem."""
    step: SamplingParams
    """How one step is sampled."""
    solution: SamplingParams
    """How a whole solution is sampled."""
    choose: str = "best"
    """One of CHOOSE, for methods that find several solutions."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The method's own arguments, by name."""
    source: str | None = None
    """A hash of the method's file; None if it comes with treegen."""
    repeats: Count = 1
    """Searches of each problem, each with its own samples."""
    verifier_args: Mapping[str, Any] = field(default_factory=dict)
    """How a verifier is read; see `treegen.evals.arguments.VERIFIER_DEFAULTS`."""
    verifier_memory: str | None = None
    """The cache size of a verifier; None for the default."""
    environment: str | None = None
    """Where the tool calls of an agent run; None for tasks that are solved by text."""
    forces_calls: bool = False
    """Whether each reply of an agent has to call a tool."""
    max_live: Count = 8
    """The largest number of live worlds of an agent's environment."""
    concurrency: Count = 64
    """The largest number of problems to search at once."""
    place: str = ""
    """Where the method is found: one of METHODS, or the absolute path/to/file.py:function."""

    def __post_init__(self) -> None:
        BaseSettings.__post_init__(self)
        if self.verifier_args and not self.evaluate.startswith(REWARD):
            raise InputError(
                f"{arg('verifier_args=')} requires a verifier; pass {arg('verifier=')}"
            )
        if self.verifier_memory is not None:
            parse_bytes(self.verifier_memory, "verifier_memory")

    @property
    def runs_code(self) -> bool:
        """Whether code runs that does not come with treegen or the model."""
        return self.source is not None or super(SearchSettings, self).runs_code

    def explain_unused(self, name: str) -> str | None:
        """Return why the setting `name` has no effect with the others; None if it has one."""
        if name == "verifier_memory" and not self.evaluate.startswith(REWARD):
            return f"without {arg('verifier=')}"
        if name in ("forces_calls", "max_live") and self.environment is None:
            return f"on {get_task_name(self.task)}, which is solved by text"
        if name == "depth" and self.environment is not None:
            return None  # it limits every episode
        if name == "step_tokens" and self.environment is not None:
            return "on an agent, because each step of an agent is a complete reply"
        if self.source is None:
            checkable = name != "width" or get_search_task(self.task).checkable
            if reason := explain_unread(self.method, name, checkable=checkable):
                return reason
        setting = "evaluate" if name == "verifier" else name
        if setting not in TreeSettings.__dataclass_fields__:
            return None
        setting_names = self._read_setting_names()
        if setting_names is None or setting in setting_names:
            return None
        if self.source is None:
            return f"on {self.method}, which reads only {', '.join(setting_names)}"
        argument = (
            f"; pass -a {setting}=VALUE to set its argument" if setting in self.arguments else ""
        )
        return f"on {self.method}, which does not read tools.settings.{setting}{argument}"

    def _read_setting_names(self) -> Collection[str] | None:
        """Return the settings that the method reads; None if they are unknown."""
        return (
            METHODS[self.method].setting_names
            if self.source is None
            else read_setting_names(self.place)
        )

    def check_temperature(self) -> None:
        """Raise InputError if several samples would continue one state, but be all the same."""
        setting_names = self._read_setting_names()
        expand = self.expand * (self.width if self.method == "rebase" else 1)
        counts = {"expand": expand, "num_samples": self.num_samples, "rollouts": self.rollouts}
        several = [
            num for name, num in counts.items() if setting_names is None or name in setting_names
        ]
        if self.method in ("ab-mcts", "majority", "rstar"):
            several.append(2)  # whatever the settings are
        if self.step.temperature == 0 and max(self.repeats, *several, 1) > 1:
            raise InputError(
                "a search requires different samples from the same state, but all samples are "
                "the same at temperature 0; use a temperature above 0"
            )

    def free_choices(self) -> dict[str, Any]:
        """Return settings that change no search, or only data that identity has hashes of."""
        free = super(SearchSettings, self).free_choices()
        if self.environment is None:  # as in runs from before there were agents
            del free["max_live"]
        return free

    def identity(self) -> dict[str, Any]:
        """Return the settings that change a search, as run.json groups them."""
        names = (setting.name for setting in fields(TreeSettings))
        values = {name: getattr(self, name) for name in (*names, *_OLD_VALUES)}
        stored = {
            name: value
            for name, value in values.items()
            if name not in _OLD_VALUES or value != _OLD_VALUES[name]
        }
        return {
            "search": {"method": self.method, **stored},
            "budget": {
                name: limit
                for name, limit in asdict(self.budget).items()
                if name != "actions" or limit is not None  # older runs do not have it
            },
            "draw": {
                **{name: getattr(self.step, name) for name in _SAMPLING_NAMES},
                **self.step.penalties,
                "step_tokens": self.step.max_tokens,
                "max_tokens": self.solution.max_tokens,
            },
        }


def _configure(task: SearchTask, arguments: Mapping[str, str], *, is_stored: bool) -> None:
    """Pass a task its arguments.

    Args:
        task: The task.
        arguments: The arguments.
        is_stored: Whether they come from a run. Searches of older versions ignored some arguments.

    Raises:
        InputError: An argument cannot be used.
    """
    try:
        task.configure(arguments)
    except InputError as error:
        required = [
            f"{name}={value}"
            for name, value in task.search_defaults.arguments.items()
            if arguments.get(name, value) != value
        ]
        if not is_stored or not required:
            raise
        raise InputError(
            f"{error}; the run stores this value, so resume the run with {arg('task_args')} "
            f"{' '.join(required)}"
        ) from None


def _check_arguments(task: SearchTask, arguments: Mapping[str, str]) -> None:
    """Check the task arguments that a user gives for a search.

    Raises:
        InputError: An argument has a value that the task supports only without a search.
    """
    for name, required in task.search_defaults.arguments.items():
        value = arguments.get(name, required)
        if value.strip() != required:
            raise InputError(
                f"a search of {task.name} requires the task argument {name}={required}, got "
                f"{value!r}; remove {name}"
            )


def _check_text_budget(budget: Budget, task: SearchTask) -> None:
    """Check the budget of searches whose solutions are texts.

    Raises:
        InputError: It limits actions.
    """
    if budget.actions is not None:
        raise InputError(
            f"the limit actions of {arg('budget=')} has no effect on {task.name}, which is solved "
            "by text; use another limit, such as tokens"
        )


def _read_method(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the method of a stored run, without importing the method."""
    method = {name: stored.get(name, _OLD_VALUES.get(name)) for name in ("arguments", "source")}
    return method | {"method": stored["method"], "place": stored.get("place") or stored["method"]}


def resolve_search_settings(
    requested: Mapping[str, Any], stored: Mapping[str, Any] | None = None, *, reading: bool = False
) -> SearchSettings:
    """Return the settings that follow from a user's choices.

    Defaults and errors are as for `treegen.evals.config.eval_settings.resolve_eval_settings`.

    Args:
        requested: The user's choices, by name.
        stored: The choices of the run that is resumed or read; they hold if the user did not
            choose.
        reading: Whether the stored run is only read. Its method is then not imported.
    """
    requested = _replace_verifier(requested)
    choices = merge_choices(SearchSettings, requested, stored)
    if not choices.get("task"):
        raise InputError("no task is given; choose a task with steps: countdown, game24 or gsm8k")
    task = get_search_task(choices["task"])
    _configure(task, choices.get("extra", {}), is_stored="extra" not in requested)
    defaults = task.search_defaults
    _check_arguments(task, requested.get("extra", {}))
    environment = _check_environment(task, choices.get("environment"))
    budget = _budget(choices.get("budget"), defaults)
    if environment is None and "budget" in requested:
        _check_text_budget(budget, task)
    if stored and reading:
        method = _read_method(stored)
    else:
        also = choices.get("also_arguments", ())
        method = _method(requested, stored or {}, defaults.method, also)
        _check_steps(method["place"], method["method"], task.name, environment)
    ways = (*EVALUATE, *defaults.evaluate)
    evaluate = _check_choice("evaluate", choices.get("evaluate", defaults.evaluator), ways)
    ways = (*PROPOSE, *defaults.propose)
    # Each way to evaluate has its own scale; the default is on the scale of the task's own ways.
    prune = defaults.prune_below if evaluate in defaults.evaluate else None
    draw = select(choices, (*_SAMPLING_NAMES, *PENALTIES))
    step, sample_params = (
        replace(default, **{"seed": default.seed or 0, **draw})
        for default in (defaults.step, defaults.solution)
    )
    if (step_tokens := choices.get("step_tokens")) is not None:
        check_int("step_tokens", step_tokens, minimum=1)
        step = replace(step, max_tokens=step_tokens)
    settings = build_settings(
        SearchSettings,
        choices,
        task.needs_data,
        **method,
        environment=environment,
        choose=_check_valid("way to choose", choices.get("choose", "best"), CHOOSE),
        propose=_check_choice("propose", choices.get("propose", PROPOSE[0]), ways),
        evaluate=evaluate,
        prune_below=choices.get("prune_below", prune),
        verifier_args=check_verifier_settings(choices.get("verifier_args", {})),
        budget=budget,
        step=step,
        solution=replace(sample_params, **select(choices, ["max_tokens"])),
        num_samples=choices.get("num_samples", task.defaults.num_samples),
        **{
            name: choices.get(name, getattr(defaults, name))
            for name in ("width", "depth", "expand")
        },
    )
    if not reading:
        settings.check_temperature()
    return settings


def _replace_verifier(requested: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return choices in which a verifier is a way to evaluate."""
    if "verifier" not in requested:
        return requested
    if "evaluate" in requested:
        raise InputError(
            f"{arg('verifier=')} and {arg('evaluate=')} cannot be used together; remove one of the "
            "two arguments"
        )
    others = {name: value for name, value in requested.items() if name != "verifier"}
    return {**others, "evaluate": f"{REWARD}{absolute(requested['verifier'])}"}


def stored_search_choices(info: "RunInfo") -> dict[str, Any]:
    """Return the choices of a search run's start or latest resume, by name.

    Raises:
        RunError: the run is not a search run.
    """
    absent = {name: value for name, value in _OLD_VALUES.items() if name not in _AGENT_SETTINGS}
    return last_choices(info, "search", groups=("search", "draw"), names=("budget",), absent=absent)


def _check_steps(place: str, name: str, task: str, environment: str | None) -> None:
    """Raise InputError if a method cannot take the steps of a task.

    Args:
        place: Where the method is. A file is run, so runs of others are not checked.
        name: The name of the method.
        task: The name of the task.
        environment: The environment of an agent; None if steps are texts.
    """
    method = find_method(place)
    if environment is None and method.needs_agent:
        raise InputError(
            f"the method {name} requires tool calls, but the task {task} is solved by text; "
            f"choose another {arg('method=')}, such as mcts"
        )
    if environment is not None and method.needs_text:
        raise InputError(
            f"the method {name} requires text, but the task {task} is solved by tool calls; "
            f"choose another {arg('method=')}, such as best-of-n, beam or mcts"
        )


def _method(
    requested: Mapping[str, Any], stored: Mapping[str, Any], default: str, also: Sequence[str]
) -> dict[str, Any]:
    """Return the settings that name the method and its arguments."""
    place, arguments = requested.get("method"), dict(requested.get("arguments", {}))
    if stored and place in (None, stored["method"]):
        arguments = {**stored.get("arguments", {}), **arguments}
        stored_place = stored.get("place") or stored["method"]
        if requested.get(ALLOW_TASK_CODE) or not is_custom_method(stored_place):
            place = stored_place
        elif place is None:
            raise InputError(
                f"the method of the run is code in the file {stored_place}, and treegen does "
                "not run this code without permission; read the code, then pass "
                f"{arg('method=')} or {arg('allow_task_code', True)}"
            )
    elif stored and short_name(str(place)) == stored["method"]:  # the method's file may have moved
        arguments = {**stored.get("arguments", {}), **arguments}
    if place is not None and not isinstance(place, str):
        raise InputError(f"{arg('method')} must be the name of a method, got {place!r:.60}")
    place = absolute_method(place or default)
    method, name = find_method(place), short_name(place)
    values = read_values(method.arguments, arguments, f"method {name}", also)
    return {"method": name, "place": place, "arguments": values, "source": method.source}


def _budget(limits: Budget | Mapping[str, Any] | None, defaults: SearchDefaults) -> Budget:
    if isinstance(limits, Budget):
        return limits
    names = {f.name for f in fields(Budget)}
    if limits is not None and (not isinstance(limits, Mapping) or limits.keys() - names):
        raise InputError(
            f"{arg('budget')} must be a Budget or a mapping of {', '.join(sorted(names))}, got "
            f"{limits!r:.60}"
        )
    return Budget(tokens=defaults.tokens) if limits is None else Budget(**limits)


def _check_environment(task: SearchTask, name: str | None) -> str | None:
    """Return the environment of a run; None for tasks that are solved by text."""
    if isinstance(task, AgentTask):
        name = name or task.environments[0]
        kind = name.partition(":")[0]
        _check_valid("environment", name if kind == "memory" else kind, task.environments)
        return name
    if name is not None:
        raise InputError(
            f"the task {task.name} is solved by text and has no environment; remove "
            f"{arg('environment=')}"
        )
    return None


def _check_valid(name: str, word: str, valid: Iterable[str]) -> str:
    valid = list(valid)
    if word not in valid:
        hint = did_you_mean(word, valid) or f"; known: {', '.join(valid)}"
        raise InputError(f"there is no {name} {word!r}{hint}")
    return word


def _check_choice(name: str, word: str, valid: Iterable[str]) -> str:
    if name == "evaluate" and word.startswith(REWARD) and word != REWARD:
        return word
    return _check_valid(f"way to {name}", word, valid)
