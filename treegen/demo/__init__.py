"""The small models that come with treegen, and problems for them: `LLM("demo")`, `treegen demo`.

examples/train_demo in the repository trained them on synthetic problems, which do not include the
problems here. MODEL_CARD.md and AGENT_CARD.md say what they can do, and how that was measured.
"""

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

NAME: Final = "demo"
"""Names the model where a checkpoint directory or a hub name is expected."""

AGENT: Final = "demo-agent"
"""Names the model that calls tools."""

MODELS: Final = {NAME: "model", AGENT: "agent"}
"""By name, the directory of each model."""

NOTICE: Final = "bundled demo model, synthetic problems"

MODEL_NOTICE: Final = "bundled demo model"

# By task, the default settings for the bundled model that knows it: NAME unless "model" says so.
_EVALUATIONS: Final[dict[str, dict[str, Any]]] = {
    # The model was trained to end an answer with a blank line.
    "gsm8k": {
        "data": "words.jsonl",
        "fewshot_file": "words_fewshot.jsonl",
        "extra": {"form": "self-consistency"},
    },
    "apps": {"data": "programs.jsonl", "fewshot_file": "programs_fewshot.jsonl", "num_samples": 20},
    "needle": {"extra": {"questions": "100", "length": "14000"}},
    "needle-grid": {"extra": {"lengths": "2000-14000/7"}},
    "countdown": {"data": "puzzles.jsonl"},
}
_SEARCHES: Final[dict[str, dict[str, Any]]] = {
    "gsm8k": _EVALUATIONS["gsm8k"],
    "countdown": {"data": "puzzles.jsonl", "method": "tot-dfs", "budget": {"tokens": 500}},
    "text-world": {"model": AGENT, "extra": {"level": "easy"}},
    "repair": {"model": AGENT},
}
_FILES: Final = ("data", "fewshot_file")


def model_path(name: str = NAME) -> Path:
    """Return the directory of a bundled checkpoint, in transformers' format."""
    return Path(str(files("treegen.demo").joinpath(MODELS[name])))


def data_path(name: str) -> Path:
    """Return a bundled data file, such as words.jsonl."""
    return Path(str(files("treegen.demo").joinpath("data", name)))


def task_arguments(task: str) -> Mapping[str, str]:
    """Return the arguments of a task that have other defaults with a bundled model."""
    settings = _EVALUATIONS.get(task) or _SEARCHES.get(task, {})
    arguments: Mapping[str, str] = settings.get("extra", {})
    return arguments


def fill_defaults(arguments: Mapping[str, Any], *, search: bool = False) -> dict[str, Any]:
    """Add the bundled model and its settings for the task to a user's settings.

    The settings are returned unchanged if they name another model, or if no bundled model knows
    the task. The bundled problems and few-shot examples are left out if the user names data.

    Args:
        arguments: The user's settings.
        search: Whether the task is searched.
    """
    defaults = (_SEARCHES if search else _EVALUATIONS).get(str(arguments.get("task")))
    if defaults is None:
        return dict(arguments)
    model = defaults.get("model", NAME)
    if str(arguments.get("model", model)) != model:
        return dict(arguments)
    added: dict[str, Any] = {
        name: str(data_path(value)) if name in _FILES else value for name, value in defaults.items()
    }
    if "data" in arguments or "fewshot_data" in arguments:
        for name in _FILES:
            added.pop(name, None)
    own = arguments.get("extra", {})
    if "extra" in added and isinstance(own, Mapping):  # settings check the type
        arguments = {**arguments, "extra": {**added["extra"], **own}}
    return {**added, **arguments, "model": model}
