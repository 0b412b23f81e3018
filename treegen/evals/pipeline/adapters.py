"""Evaluations of one model with several adapters, each in its own directories."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from treegen import demo
from treegen.common.files.paths import file_name
from treegen.errors import InputError
from treegen.evals.pipeline.evaluation import EvaluationResult, evaluate_all
from treegen.evals.pipeline.execution import ModelLoader
from treegen.evals.pipeline.listener import Listener
from treegen.evals.pipeline.targets import is_run, named_path, new_path
from treegen.evals.task import Task


def evaluate_adapters(
    adapters: Sequence[str],
    tasks: Sequence[str | Task],
    asked: Mapping[str, Any],
    models: ModelLoader,
    listener: Listener,
    *,
    output: str | None = None,
    resume: str | None = None,
    **how: Any,
) -> list[list[EvaluationResult]]:
    """Run evaluations with each adapter in a folder of its name; the weights are read once.

    Args:
        adapters: Directories of adapters.
        tasks: Tasks or their names.
        asked: As for `evaluate_all`, without an adapter.
        models: Loads the models.
        listener: Receives messages and progress.
        output: The parent directory; None for a new one in runs/.
        resume: A parent directory whose runs are resumed, and started where there are none; ""
            means `output`.
        how: Further arguments of `evaluate_all`.

    Raises:
        InputError: two adapters have the same name, or a directory is taken.
        ModelError: an adapter cannot be used. Nothing is drawn then.
    """
    from treegen.model.checkpoint.adapter import find_adapter
    from treegen.model.weights import share_base_weights

    if models.given is not None or models.on_workers:
        raise InputError("several adapters need a model that this process loads; run them apart")
    if "adapter" in asked:
        raise InputError("the adapter is given twice; leave it out of --model-args")
    model = Path(str(asked.get("model", demo.NAME))).name
    whole = named_path(output, resume) or new_path("adapters", model)
    folders = [file_name(Path(adapter).name) for adapter in adapters]
    if len({*folders}) < len(folders):
        raise InputError(
            f"two adapters have the same name: {', '.join(folders)}; rename a directory, or run "
            "them apart"
        )
    if is_run(whole):
        raise InputError(f"{whole} is one run; give the directory of the adapters' runs")
    for adapter, folder in zip(adapters, folders, strict=True):
        find_adapter(adapter)
        if resume is None and (whole / folder).exists():
            raise InputError(f"{whole / folder} exists already; continue by --resume {whole}")
    results = []
    with share_base_weights():
        for adapter, folder in zip(adapters, folders, strict=True):
            choices = {**asked, "adapter": adapter}
            path, again = str(whole / folder), None if resume is None else ""
            results.append(
                evaluate_all(tasks, choices, models, listener, output=path, resume=again, **how)
            )
    return results
