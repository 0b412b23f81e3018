"""The errors that treegen raises on purpose; each message says what is wrong and what to do."""


class TreegenError(Exception):
    """Base of every error that the caller can fix; the CLI prints it in one line."""


class InputError(TreegenError, ValueError):
    """An argument, a flag or a file has a value that cannot be used."""


class MissingNameError(InputError, AttributeError):
    """A name that another library has, and treegen has not."""


class TreeError(InputError):
    """The declared prompt tree is malformed."""


class DataError(InputError):
    """A data file is missing, empty or malformed."""


class ModelError(TreegenError):
    """The model cannot be loaded, or would give wrong numbers."""


class CapacityError(TreegenError):
    """The work needs more key-value memory or context than is available."""


class CacheFullError(CapacityError):
    """The work needs more key-value memory than is available; a larger cache would suffice."""


class ContextError(CapacityError):
    """A prompt leaves no room for an answer in the model's context."""


class BusyError(TreegenError):
    """Too much work is pending to accept more; the same request may succeed later."""


class StoppedError(InputError):
    """The request is not served, because the server or model is closed or about to close."""


class TaskError(TreegenError):
    """The code of a task fails, or returns something that is not allowed."""


class RunError(TreegenError):
    """A run directory cannot be written, resumed or read."""


class RunInUseError(RunError):
    """Another process appends to a run, or has done so since the run was read."""


class WorkerError(TreegenError):
    """Workers of a cluster were lost, or a problem crashes them; the rest of the work is kept."""


class InternalError(TreegenError):
    """A bug in treegen, such as a run that cannot continue; please report it."""


class NumericsError(TreegenError):
    """The model returned logits that are not finite."""


class ModelWarning(UserWarning):
    """The model can be used, but not everything that its files specify is supported."""


def install(extra: str) -> str:
    """Return the command that installs an extra of treegen, for messages.

    The name `treegen` belongs to another project on PyPI, so no command uses it.
    """
    return f"pip install '.[{extra}]' in treegen's checkout, or 'WHEEL[{extra}]' for its wheel"
