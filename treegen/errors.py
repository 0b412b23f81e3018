"""Errors that treegen raises on purpose; the message says what is wrong and what to do."""


class TreegenError(Exception):
    """Base of every error that is the caller's to mend; the CLI prints it in one line."""


class InputError(TreegenError, ValueError):
    """An argument, a flag or a file has a value that cannot be used."""


class TreeError(InputError):
    """The declared prompt tree is malformed."""


class DataError(InputError):
    """A data file is missing, empty or malformed."""


class ModelError(TreegenError):
    """The model cannot be loaded, or would give wrong numbers."""


class CapacityError(TreegenError):
    """The work needs more key-value memory or context than there is."""


class CacheFullError(CapacityError):
    """The work needs more key-value memory than there is, and could be done with more."""


class ContextError(CapacityError):
    """A prompt leaves no room for an answer in the model's context."""


class BusyError(TreegenError):
    """Too much is under way to take more now; the same may be asked for again later."""


class StoppedError(InputError):
    """What was asked for is not done, because who was asked is closed or about to be."""


class TaskError(TreegenError):
    """The code of a task fails, or gives what no task may."""


class RunError(TreegenError):
    """A run directory cannot be written, resumed or read."""


class RunInUseError(RunError):
    """Another process appends to a run, or has done so since the run was read."""


class WorkerError(TreegenError):
    """Workers of a cluster are lost, or a problem breaks them; the rest of the work is kept."""


class InternalError(TreegenError):
    """A mistake of treegen's own, such as a run that cannot go on; please report it."""


class NumericsError(TreegenError):
    """The model returned logits that are not numbers."""


class ModelWarning(UserWarning):
    """The model can be used, but not in all that its files promise."""


def install(extra: str) -> str:
    """The command that installs an extra of treegen, for messages.

    The name `treegen` belongs to somebody else on PyPI, so no command names it.
    """
    return f"pip install '.[{extra}]' in treegen's checkout, or 'WHEEL[{extra}]' for its wheel"
