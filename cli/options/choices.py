"""The user's options as choices of settings, tasks, workers and permissions."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from treegen.cli.options.options import hyphenate
from treegen.cli.options.pairs import CONFIDENCE, GEN_KWARGS, MODEL_ARGS, read_pairs
from treegen.common.files import describe_read_error, read_text
from treegen.errors import InputError
from treegen.model.options import EngineOptions

if TYPE_CHECKING:
    from treegen.evals.scoring.code_execution import ExecutionOptions
    from treegen.llm.cluster.placement import Placement

_MAX_NUMBER: Final = 9_999_999
# Flags that may be False: their --no- form differs from leaving them out.
_NEGATABLE: Final = ("chat", "fewshot_as_multiturn", "score")
_TASKS: Final = ("names", "more_names", "include_path")
_EXECUTION: Final = ("allow_code_execution", "sandbox", "num_workers")
_READING: Final = ("data", "task", "allow_task_code")
# Options of workers, and their names in `parse_placement`.
_WORKERS: Final = {"gpus": "gpus", "workers": "workers", "ray": "address"}
_LISTS: Final = {"model_args": MODEL_ARGS, "gen_kwargs": GEN_KWARGS}
# Options that are no settings; the functions below read them.
_NO_SETTINGS: Final = {*_TASKS, *_EXECUTION, *_WORKERS, *_LISTS, "task_args"}


def collect_choices(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that the user typed, by the names of settings.

    Args:
        params: The parameters of a command. Those of tasks, workers and permissions are left out.

    Raises:
        InputError: an option has a value that cannot be read, or a setting is given twice.
    """
    # Its package is slow to import, and help does not need it.
    from treegen.evals.arguments import read_arguments

    choices = drop_unset({n: value for n, value in params.items() if n not in _NO_SETTINGS})
    if "adapter" in choices:
        choices["adapter"], *more = choices["adapter"]
        if more:
            raise InputError(
                "only `treegen eval` accepts several adapters; pass --adapter only once"
            )
    for option, readers in _LISTS.items():
        flag = f"--{hyphenate(option)}"
        for name, value in _read_list(params.get(option, ()), flag, readers).items():
            if name in choices and choices[name] != value:
                raise InputError(
                    f"{name} has two values: {choices[name]!r} in its own option and {value!r} "
                    f"in {flag}; remove one of the two values"
                )
            choices[name] = value
    if extra := read_arguments(params.get("task_args", ())):
        choices["extra"] = extra
    return {
        name: _READERS[name](value) if name in _READERS else value
        for name, value in choices.items()
    }


def drop_unset(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters that the user set; unset ones are None, (), or False for most flags."""
    return {
        name: value
        for name, value in params.items()
        if value is not None and value != () and (value is not False or name in _NEGATABLE)
    }


def _read_list(
    texts: Any, flag: str, readers: Mapping[str, Callable[[str], Any]]
) -> dict[str, Any]:
    pairs = read_pairs(texts, flag, readers)
    if pairs.get("do_sample") is False:
        pairs["temperature"] = 0.0
    return {name: value for name, value in pairs.items() if name != "do_sample"}


def pop_reading(params: dict[str, Any]) -> dict[str, Any]:
    """Take the options of the group "reading" out of all options; return those that are set."""
    return drop_unset({name: params.pop(name) for name in _READING})


def make_engine(params: Mapping[str, Any]) -> EngineOptions:
    """Return the model that the user named, and how it computes."""
    choices = collect_choices(params)
    if "model" not in choices:
        raise InputError("--model is missing; pass a checkpoint directory, a hub name or demo")
    return EngineOptions(**choices)


def make_execution(
    params: Mapping[str, Any], *, rescore: bool = False
) -> "ExecutionOptions | None":
    """Return the permission to run programs, and how; None without it.

    Args:
        params: The parameters of a command.
        rescore: Whether samples that have a verdict are judged again. Default: False.
    """
    from treegen.evals.pipeline.program_scoring import make_execution_options

    return make_execution_options(*(params[name] for name in _EXECUTION), rescore=rescore)


def make_placement(params: Mapping[str, Any], device: str = "auto") -> "Placement | None":
    """Return where workers run; None if no option of workers is given.

    Args:
        params: The parameters of a command.
        device: The device that the user named.
    """
    options = {
        name: params[option] for option, name in _WORKERS.items() if params[option] is not None
    }
    if not options:
        return None
    # Imported here, because it imports slow libraries.
    from treegen.llm.cluster.placement import parse_placement

    return parse_placement(**options, device=device)


def collect_tasks(params: Mapping[str, Any]) -> list[str]:
    """Return the tasks that the user named, in their order."""
    words = [*params["names"], *params["more_names"]]
    folder = params.get("include_path")
    names = [name for word in words for name in _expand_tasks(word, folder)]
    if folder is not None and not any("@" in name for name in names):
        raise InputError(
            "--include-path has no effect without tasks named lm-eval:TASK; remove --include-path"
        )
    for number, name in enumerate(names):
        if name in names[:number]:
            raise InputError(f"the task {name!r} is listed twice; list each task only once")
    return names


def _expand_tasks(word: str, folder: str | None) -> list[str]:
    """Return the tasks in a word; if it begins with lm-eval:, all are lm-eval's."""
    # Its package is slow to import, and help does not need it.
    from treegen.evals.registry import LM_EVAL

    names = [name.strip() for name in word.split(",") if name.strip()]
    if not word.strip().startswith(LM_EVAL):
        return names
    full_names = [f"{LM_EVAL}{name.removeprefix(LM_EVAL)}" for name in names]
    return [name if folder is None or "@" in name else f"{name}@{folder}" for name in full_names]


def whole_numbers(text: str, flag: str, minimum: int = 0) -> tuple[int, ...]:
    """Return the comma-separated integers in a text.

    Args:
        text: The text.
        flag: The name of the option, for the error message.
        minimum: The smallest allowed number. Default: 0.

    Raises:
        InputError: the text has another form.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(is_number(word, minimum) for word in words):
        raise InputError(
            f"{flag} must be comma-separated integers from {minimum} to {_MAX_NUMBER:,}, got "
            f"{text!r}"
        )
    return tuple(map(int, words))


def is_number(word: str, minimum: int = 1) -> bool:
    """Whether a word is an integer from `minimum` up to the largest allowed number."""
    # Count the digits first, because Python rejects numbers with thousands of digits.
    is_short = word.isascii() and word.isdecimal() and len(word) <= len(str(_MAX_NUMBER))
    return is_short and minimum <= int(word) <= _MAX_NUMBER


def _unescape(text: str) -> str:
    # These characters are hard to type in a shell.
    return text.replace(r"\n", "\n").replace(r"\t", "\t")


def _read_schema(file: str) -> str:
    try:
        return read_text(file)
    except OSError as error:
        raise InputError(
            f"--json-schema cannot be read: {describe_read_error(file, error)}"
        ) from None
    except ValueError as error:
        raise InputError(
            f"--json-schema: {file} cannot be read: {error}; save the file as UTF-8"
        ) from None


def _read_confidence(text: str) -> dict[str, Any]:
    settings = read_pairs([text], "--confidence", CONFIDENCE)
    if "warmup" in settings and "keep" not in settings:
        raise InputError("--confidence: warmup has no effect without keep; set keep=SHARE too")
    return settings


def _read_ks(text: str, flag: str) -> tuple[int, ...]:
    return tuple(sorted(set(whole_numbers(text, flag, minimum=1))))


def _read_pass_hat_ks(text: str) -> tuple[int, ...]:
    return () if text.strip() == "none" else _read_ks(text, "--pass-hat-k")


def _read_rows(value: object) -> int | None:
    if isinstance(value, int):
        return value
    text = str(value).strip()
    if text != "auto" and not is_number(text, 0):
        raise InputError(
            f"--max-rows must be an integer or auto, and at most {_MAX_NUMBER:,}, got {value!r:.60}"
        )
    return None if text == "auto" else int(text)


_READERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "stop": lambda texts: tuple(map(_unescape, texts)),
    "json_schema": _read_schema,
    "thinking_end": _unescape,
    "max_rows": _read_rows,
    "confidence": _read_confidence,
    "pass_ks": partial(_read_ks, flag="--k"),
    "maj_ks": partial(_read_ks, flag="--maj"),
    "pass_hat_ks": _read_pass_hat_ks,
}
