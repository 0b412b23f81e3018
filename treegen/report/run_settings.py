"""The key settings of runs: a line that describes a run, and the settings in which runs differ."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, is_dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from treegen.common.formatting import safe_line
from treegen.errors import InputError, RunError
from treegen.evals.registry import is_builtin_task
from treegen.runs.files import parse_json

if TYPE_CHECKING:
    from treegen.report.view import RunView
    from treegen.runs import RunInfo

_MAX_CHARS: Final = 40  # characters of a text
# Settings that are not compared: places of data and code, storage, display and speed. Other values
# of `KeySettings` contain the model and its dtypes.
_EXCLUDED: Final = (
    "task data split limit ids run_dir place source sources fewshot_file fewshot_data include_path "
    "data_files hub_cache judged_by score log_tokens pass_ks maj_ks pass_hat_ks votes concurrency "
    "model revision dtype quantization kv_cache_dtype adapter num_fewshot "
    "device memory page_size max_rows prefill_chunk sharing impl eager compile run_ahead "
    "reproducible check trust_remote_code tensor_parallel_size speculate draft_model "
    "draft_tokens images verifier_memory stop_batch"
)
NO_SETTING: Final = "no setting that affects samples"
"""What runs differ in if all settings that are compared are equal."""
# The settings of an imported log that were recorded, for runs that do not store which ones were.
_USUALLY_RECORDED: Final = (
    "temperature",
    "top_p",
    "top_k",
    "max_tokens",
    "stop",
    "seed",
    "num_fewshot",
)
_NOT_RECORDED: Final = "not recorded"
# The line that describes a run leaves out settings with these values.
_DEFAULT_VALUES: Final = {
    "top_p": 1,
    "top_k": 0,
    "min_p": 0,
    "repeats": 1,
    "reasoning": "auto",
    "stop_when": "never",
    "seed": 0,
}


@dataclass(frozen=True, slots=True)
class KeySettings:
    """The settings of a run that affect its samples."""

    model: str
    """The name of the model, with its adapter if it has one."""
    values: Mapping[str, Any]
    """Other settings by name, those that every run shows first."""
    weights: str = ""
    """The hash of the weights."""
    recorded: frozenset[str] | None = None
    """The settings that an imported log contains; None if all are known."""
    shows_samples: bool = True
    """Whether the line about the run has num_samples; False for a search of a user's own task by a
    user's own method, because such a search may not read the setting."""

    @staticmethod
    def of(view: "RunView") -> "KeySettings":
        """Return the settings of a loaded run."""
        rows = view.report.metrics if view.report else ()
        num_fewshot = next((row.num_fewshot for row in rows if row.num_fewshot is not None), None)
        return KeySettings.of_info(view.info, searched=view.searched, num_fewshot=num_fewshot)

    @staticmethod
    def of_info(
        info: "RunInfo", *, searched: bool = False, num_fewshot: int | None = None
    ) -> "KeySettings":
        """Return the settings that run.json has.

        Args:
            info: The content of run.json.
            searched: Whether the problems are searched.
            num_fewshot: The number of few-shot examples; None takes the number in run.json.
        """
        from treegen.evals.config.eval_settings import stored_choices
        from treegen.evals.search.settings import stored_search_choices

        choices: Mapping[str, Any] = {}
        with suppress(RunError):
            choices = (stored_search_choices if searched else stored_choices)(info)
        return KeySettings.of_choices(
            choices,
            info.identity.get("model"),
            num_fewshot=num_fewshot,
            imported="imported" in info.identity,
        )

    @staticmethod
    def of_results(results: Mapping[str, Any]) -> "KeySettings":
        """Return the settings of a run.

        Args:
            results: The content of its results.json.
        """
        rows = (results.get("report") or {}).get("metrics", ())
        num_fewshot = next((r["num_fewshot"] for r in rows if r["num_fewshot"] is not None), None)
        imported = "imported from" in results.get("versions", {})
        choices = results.get("settings", {})
        if "method" in results:
            choices = {"method": results["method"], **choices}
        return KeySettings.of_choices(
            choices, results.get("model"), num_fewshot=num_fewshot, imported=imported
        )

    @staticmethod
    def of_choices(
        choices: Mapping[str, Any],
        weights: object,
        *,
        num_fewshot: int | None = None,
        imported: bool = False,
    ) -> "KeySettings":
        """Return the settings of a run.

        Args:
            choices: Its settings by name, as `stored_choices` returns them.
            weights: The entry of run.json about the model: its fingerprint and dtypes.
            num_fewshot: The number of few-shot examples; None takes the number in `choices`.
            imported: Whether another tool drew the samples. Then the fingerprint is the name of
                the model.
        """
        facts = weights if isinstance(weights, Mapping) else {}
        model = str(facts.get("fingerprint", "")) if imported else str(choices.get("model") or "")
        name = short_model_name(model)
        if adapter := choices.get("adapter"):
            name += f" + {Path(str(adapter)).name}"
        if num_fewshot is None:
            num_fewshot = choices.get("num_fewshot")
        excluded = set(_EXCLUDED.split())
        values = {
            "method": choices.get("method"),
            "budget": _to_plain(choices.get("budget")),
            "num_samples": choices.get("num_samples"),
            "temperature": choices.get("temperature"),
            "max_tokens": choices.get("max_tokens"),
            "num_fewshot": num_fewshot,
            "apply_chat_template": choices.get("apply_chat_template"),
            "system_instruction": choices.get("system_instruction"),
            **{k: facts.get(k) for k in ("dtype", "quantization", "kv_cache_dtype")},
            **{k: _to_plain(v) for k, v in choices.items() if k not in excluded},
        }
        if not _reads_num_samples(choices):
            del values["num_samples"]
        if not imported:
            weights_hash = str(facts.get("fingerprint", ""))
            is_shown = not _is_own_search(choices)
            return KeySettings(name, values, weights_hash, shows_samples=is_shown)
        recorded = _list_recorded(choices)
        return KeySettings(
            name, {k: v for k, v in values.items() if k in recorded}, recorded=recorded
        )

    def is_known(self, name: str) -> bool:
        """Return whether the value of a setting is known."""
        return self.recorded is None or name in self.recorded

    def describe(self, task: str, *, short: bool = False) -> str:
        """Return a line such as "gsm8k with demo: n 8, temperature 0.7, 8-shot".

        Args:
            task: The name of the run's task.
            short: Whether to name only the task and the model.
        """
        parts = "" if short else ", ".join(self._list_parts())
        title = f"{task} with {self.model}" if self.model else task
        return safe_line(f"{title}: {parts}" if parts else title)

    def _list_parts(self) -> Iterator[str]:
        """Yield the parts of the line that describes the run."""
        value = self.values.get
        if value("method"):
            yield str(value("method"))
        if budget := value("budget"):
            limits = {k: v for k, v in budget.items() if v is not None}
            yield f"budget {_join(limits)}"
        for name, label in (
            ("num_samples", "n"),
            ("repeats", "repeats"),
            ("temperature", "temperature"),
            ("top_p", "top_p"),
            ("top_k", "top_k"),
            ("min_p", "min_p"),
            ("max_tokens", "max_tokens"),
        ):
            if name == "num_samples" and not self.shows_samples:
                continue
            if value(name) is not None and value(name) != _DEFAULT_VALUES.get(name, object()):
                yield f"{label} {value(name)}"
        if value("num_fewshot") is not None:
            yield f"{value('num_fewshot')}-shot"
        if value("apply_chat_template"):
            yield "chat template"
        if system := value("system_instruction"):
            yield f"system text {_shorten(system)}"
        for name in ("reasoning", "quantization", "kv_cache_dtype", "stop_when", "seed"):
            if value(name) is not None and value(name) != _DEFAULT_VALUES.get(name, object()):
                yield f"{name} {value(name)}"

    def searches_unlike(self, other: "KeySettings") -> bool:
        """Return whether both runs are searches, by different methods."""
        methods = self.values.get("method"), other.values.get("method")
        return None not in methods and methods[0] != methods[1]

    def differing(self, other: "KeySettings") -> dict[str, tuple[str, str]]:
        """Return the settings in which another run differs: both values as text, by name."""
        pairs: dict[str, tuple[str, str]] = {}
        unread = self._list_own_settings(other)
        if self.model != other.model and (self.weights != other.weights or not self.weights):
            pairs["model"] = self.model, other.model
        elif self.weights != other.weights and self.weights and other.weights:
            pairs["weights"] = self.weights[:8], other.weights[:8]
        for name in dict.fromkeys((*self.values, *other.values)):
            if name in unread or not (self.is_known(name) and other.is_known(name)):
                continue
            a, b = self.values.get(name), other.values.get(name)
            if isinstance(a or b, Mapping):
                keys = dict.fromkeys((*(a or {}), *(b or {})))
                if name == "arguments" and self.searches_unlike(other):
                    # An argument that only one of the methods has follows from the method.
                    keys = dict.fromkeys(key for key in a or {} if key in (b or {}))
                for key in keys:
                    c, d = (a or {}).get(key), (b or {}).get(key)
                    if c != d:
                        pairs[str(key) if name == "extra" else f"{name}.{key}"] = (
                            _format_value(c),
                            _format_value(d),
                        )
            elif a != b and not (_is_off(a) and _is_off(b)):
                pairs[name] = _format_value(a), _format_value(b)
        return pairs

    def _list_own_settings(self, other: "KeySettings") -> set[str]:
        """Return the tree settings that follow from the methods of two searches.

        These are settings that only one of two methods reads. Which settings a user's own method
        reads is unknown, so all of them follow from it.
        """
        from treegen.evals.search.method_types import TreeSettings
        from treegen.evals.search.methods import METHODS

        if not self.searches_unlike(other):
            return set()
        methods = [METHODS.get(str(side.values.get("method"))) for side in (self, other)]
        setting_names = [
            set[str]() if method is None else {*method.setting_names} for method in methods
        ]
        return {*TreeSettings.__dataclass_fields__} - (setting_names[0] & setting_names[1])


def describe_view(view: "RunView", *, short: bool = False) -> str:
    """Return the line that says what a run is: its task, its model and its key settings.

    Args:
        view: The run.
        short: Whether to name only the task and the model.
    """
    return KeySettings.of(view).describe(view.task, short=short)


def describe_results(results: Mapping[str, Any], *, short: bool = False) -> str:
    """Return the line that says what a run is, from the content of its results.json.

    Args:
        results: The content of results.json.
        short: Whether to name only the task and the model.
    """
    return KeySettings.of_results(results).describe(results["task"]["name"], short=short)


def differing_settings(a: KeySettings, b: KeySettings) -> tuple[str, ...]:
    """Return the settings in which two runs differ, such as "temperature 0.7 / 1.0".

    Args:
        a: The settings of the first run.
        b: The settings of the second run.
    """
    return tuple(f"{name} {x} / {y}" for name, (x, y) in a.differing(b).items())


def describe_random_numbers(a: "RunView", b: "RunView", *, is_similar: bool) -> str:
    """Return whether two runs drew with the same random numbers.

    The random numbers of a sample follow from the seed, its problem and its index. The result is ""
    if treegen did not draw both runs, if a run is greedy or its seed is unknown, or if the runs
    search by different methods.

    Args:
        a: The first run.
        b: The second run.
        is_similar: Whether some samples have the same text in both runs.
    """
    if any("imported" in view.info.identity for view in (a, b)):
        return ""
    if KeySettings.of(a).searches_unlike(KeySettings.of(b)):
        return ""  # different methods sample at different nodes
    settings = [KeySettings.of(view).values for view in (a, b)]
    if any(not values.get("temperature") or values.get("seed") is None for values in settings):
        return ""
    seeds = [values["seed"] for values in settings]
    if seeds[0] != seeds[1]:
        return f"independent (seed {seeds[0]} / {seeds[1]})"
    line = f"the same in both runs (seed {seeds[0]})"
    return f"{line}, so similar runs differ by less noise" if is_similar else line


def differing_columns(settings: Sequence[KeySettings]) -> dict[str, list[str]]:
    """Return the settings that are not the same in all runs: the value of each run, by name.

    The value is "" for a search by a method that does not read the setting.

    Args:
        settings: The settings of each run.
    """
    columns: dict[str, list[str | None]] = {}
    for (i, a), (j, b) in combinations(enumerate(settings), 2):
        for name, pair in a.differing(b).items():
            column = columns.setdefault(name, [None] * len(settings))
            column[i], column[j] = pair
    return {
        name: [
            value if value is not None else "" if run.is_known(name) else _NOT_RECORDED
            for run, value in zip(settings, column, strict=True)
        ]
        for name, column in columns.items()
    }


def short_model_name(model: str) -> str:
    """Return a hub name unchanged, and the last part of a path."""
    is_path = model.startswith(("/", ".", "~")) or model.count("/") > 1
    return Path(model).name if is_path else model


def _list_recorded(choices: Mapping[str, Any]) -> frozenset[str]:
    """Return the settings that an imported log contains."""
    names: Any = None
    with suppress(KeyError, TypeError, ValueError):
        names = parse_json(choices["extra"]["recorded"])
    is_list = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return frozenset(names if is_list else _USUALLY_RECORDED) | {"num_samples"}


def _reads_num_samples(choices: Mapping[str, Any]) -> bool:
    """Return whether a run reads the setting num_samples.

    A user's own method counts as reading it, unless the setting has the default of the task.
    """
    if (method := choices.get("method")) is None:
        return True
    from treegen.evals.search.methods import METHODS
    from treegen.evals.search.task import get_search_task

    if method in METHODS:
        return "num_samples" in METHODS[method].setting_names
    task = str(choices.get("task", ""))
    if not is_builtin_task(task):
        return True
    try:
        default = get_search_task(task).defaults.num_samples
    except InputError:  # a run of a version in which the task could be searched
        return True
    return bool(choices.get("num_samples") != default)


def _is_own_search(choices: Mapping[str, Any]) -> bool:
    """Return whether a method of the user's own searches a task of the user's own."""
    from treegen.evals.search.methods import METHODS

    task, method = choices.get("task"), choices.get("method")
    return bool(task and method) and method not in METHODS and not is_builtin_task(str(task))


def _to_plain(value: object) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _is_off(value: object) -> bool:
    """Return whether a setting has no effect; runs of earlier versions may lack such settings."""
    return value in (None, False, "", [], {}, "auto", "never")


def _format_value(value: object) -> str:
    return _shorten(value) if isinstance(value, str) else "none" if value is None else str(value)


def _shorten(text: str) -> str:
    flat = " ".join(text.split())
    return repr(flat if len(flat) <= _MAX_CHARS else f"{flat[:_MAX_CHARS]}...")


def _join(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())
