"""The errors that treegen raises on purpose; each message says what is wrong and what to do."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

_MARK: Final = "\x1f"  # encloses references in a text until a Message is made of it


def arg(name: str, *value: object) -> str:
    """Return a reference to a parameter, for the text of an error or of a `Message`.

    Python shows "name", "name=" or "name=value". A command shows its option for the parameter.

    Args:
        name: The parameter's name; "name=" where it would otherwise read like a common word.
        value: The value that the parameter has or should have, if there is one.
    """
    reference = f"{name}={value[0]!r}" if value else name
    return f"{_MARK}{reference}{_MARK}"


class Message(str):
    """A text that knows where it refers to parameters. As text it has Python's names of them."""

    parts: tuple[str, ...]
    """Texts and references in turn; the first part is a text."""

    def __new__(cls, text: str = "") -> "Message":
        """Return the message of a text that may have references, made by `arg`."""
        parts = text.parts if isinstance(text, Message) else tuple(str(text).split(_MARK))
        message = super().__new__(cls, "".join(parts))
        message.parts = parts
        return message

    @property
    def parameter(self) -> str | None:
        """The name of the first parameter that the message refers to; None if there is none."""
        name = self.parts[1].partition("=")[0] if len(self.parts) > 1 else ""
        return name if name.isidentifier() else None

    @property
    def marked(self) -> str:
        """The text as another message may contain it, with its references."""
        return _MARK.join(self.parts)

    def rename(self, spell: Callable[[str], str]) -> str:
        """Return the text with other names of parameters.

        Args:
            spell: Returns what stands for a reference; see `arg`.
        """
        return "".join(spell(part) if i % 2 else part for i, part in enumerate(self.parts))


class TreegenError(Exception):
    """Base of every error that the caller can fix; a command prints it in one line.

    Attributes:
        message: What is wrong, and what to do.
    """

    def __init__(self, message: str = "", *others: object) -> None:
        """Create the error.

        Args:
            message: What is wrong, and what to do. `arg` marks the parameters that it names.
            others: Further values for `args`.
        """
        self.message = Message(message)
        super().__init__(self.message, *others)

    @property
    def parameter(self) -> str | None:
        """The name of the first parameter that the message names; None if it names none."""
        return self.message.parameter


class InputError(TreegenError, ValueError):
    """An argument, a flag or a file has a value that cannot be used."""


class MissingNameError(InputError, AttributeError):
    """A name that another library has and treegen does not have."""


class MissingImportError(InputError, ImportError):
    """A name that another library has and treegen does not have, in an import."""


class MissingModuleError(InputError, ModuleNotFoundError):
    """A module that another library has and treegen does not have."""


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


class WorldError(TreegenError):
    """An environment of an agent failed; nothing is known about the action that it was to run."""


class ModelWarning(UserWarning):
    """The model can be used, but not everything that its files specify is supported."""


def install(extra: str) -> str:
    """Return the text of the command that installs an extra of treegen, for messages.

    The name `treegen` belongs to another project on PyPI, so no command uses it.
    """
    return f"pip install '.[{extra}]' in treegen's checkout, or 'WHEEL[{extra}]' for its wheel"


@contextmanager
def require_extra(what: str, extra: str) -> Iterator[None]:
    """Raise InputError if a package that the block imports is not installed.

    Args:
        what: What needs the package, such as "reports need jinja2".
        extra: The extra of treegen that installs it.
    """
    try:
        yield
    except ImportError:
        raise InputError(f"{what}; install it with: {install(extra)}") from None
