"""Hierarchical sampling from language models: shared prompts are computed and stored once."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from treegen.common.foreign_imports import ForeignImports, check_attribute
from treegen.common.version import VERSION

if TYPE_CHECKING:
    from treegen.api.judging import Judgings, judge, judgings
    from treegen.api.run import Run, evaluate, open_run, search_task
    from treegen.common.drafter import DraftContext
    from treegen.common.outputs import (
        Completion,
        LevelRows,
        RequestOutput,
        Score,
        Status,
        Thinking,
        Usage,
        WorkerStatus,
    )
    from treegen.common.params import SamplingParams
    from treegen.common.structured_outputs import StructuredOutputsParams
    from treegen.engine.segments.prefix_cache import Kept
    from treegen.engine.stream import RunResult, ScoreStream, Stream
    from treegen.errors import (
        BusyError,
        CapacityError,
        DataError,
        InputError,
        InternalError,
        ModelError,
        ModelWarning,
        NumericsError,
        RunError,
        RunInUseError,
        TreeError,
        TreegenError,
        WorkerError,
    )
    from treegen.llm import LLM
    from treegen.llm.async_llm import AsyncLLM
    from treegen.llm.cluster.cluster import Cluster
    from treegen.model.load import from_module, load_model
    from treegen.model.model import Model
    from treegen.prompts.expansion import Expand
    from treegen.prompts.plan.plan import Plan
    from treegen.prompts.tree import Message, Node

__version__ = VERSION

__all__ = [
    "LLM",
    "AsyncLLM",
    "BusyError",
    "CapacityError",
    "Cluster",
    "Completion",
    "DataError",
    "DraftContext",
    "Expand",
    "InputError",
    "InternalError",
    "Judgings",
    "Kept",
    "LevelRows",
    "Message",
    "Model",
    "ModelError",
    "ModelWarning",
    "Node",
    "NumericsError",
    "Plan",
    "RequestOutput",
    "Run",
    "RunError",
    "RunInUseError",
    "RunResult",
    "SamplingParams",
    "Score",
    "ScoreStream",
    "Status",
    "Stream",
    "StructuredOutputsParams",
    "Thinking",
    "TreeError",
    "TreegenError",
    "Usage",
    "WorkerError",
    "WorkerStatus",
    "evaluate",
    "from_module",
    "judge",
    "judgings",
    "load_model",
    "open_run",
    "search_task",
]

# The modules of the public names. A module is imported when one of its names is first used, so that
# `import treegen` and `treegen --help` do not import torch.
_MODULES: Final = {
    "treegen.engine.segments.prefix_cache": "Kept",
    "treegen.llm.cluster.cluster": "Cluster",
    "treegen.common.outputs": (
        "Completion LevelRows RequestOutput Score Status Thinking Usage WorkerStatus"
    ),
    "treegen.common.params": "SamplingParams",
    "treegen.common.structured_outputs": "StructuredOutputsParams",
    "treegen.common.drafter": "DraftContext",
    "treegen.engine.stream": "RunResult ScoreStream Stream",
    "treegen.errors": (
        "BusyError CapacityError DataError InputError InternalError ModelError "
        "ModelWarning NumericsError RunError RunInUseError TreeError TreegenError WorkerError"
    ),
    "treegen.llm": "LLM",
    "treegen.llm.async_llm": "AsyncLLM",
    "treegen.model.load": "from_module load_model",
    "treegen.model.model": "Model",
    "treegen.prompts.plan.plan": "Plan",
    "treegen.prompts.expansion": "Expand",
    "treegen.prompts.tree": "Message Node",
    "treegen.api.judging": "Judgings judge judgings",
    "treegen.api.run": "Run evaluate open_run search_task",
}
# In a notebook: before transformers warns that it cannot draw widgets.
if "IPython" in sys.modules:
    from treegen.common.progress import silence_tqdm_warning

    silence_tqdm_warning()

# After all other finders, so that it sees only imports that would fail.
sys.meta_path.append(ForeignImports())

_MODULE_OF: Final = {name: module for module, names in _MODULES.items() for name in names.split()}

# Hidden from type checkers, to which a module with __getattr__ has every attribute.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _MODULE_OF:
            check_attribute(name)
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from treegen.common.lifetimes import pause_gc

        with pause_gc():  # collections take a fifth of the time, and what is imported stays
            value = getattr(import_module(_MODULE_OF[name]), name)
        globals()[name] = value
        return value

    def __dir__() -> list[str]:
        """List the public names, imported or not."""
        return sorted(__all__)
