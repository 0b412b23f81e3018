"""The `treegen` command: finds its subcommands, and turns every error into one line.

A command's module is imported when the command runs, and slow libraries later still, so help
answers at once. Exit codes: 0 done, 1 less done than planned or a failed check, 2 an error that the
user can fix, 128 plus the number of a signal.
"""

import errno
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from typing import IO, Any, Final, TextIO, cast

import click

import treegen
from treegen.cli.options.options import CONTEXT
from treegen.cli.terminal.flags import (
    describe_unknown_option,
    rename_arguments,
    suggest_model_option,
)
from treegen.cli.terminal.interrupts import Interrupted, raising_signals
from treegen.common.formatting import safe_text
from treegen.common.spelling import did_you_mean
from treegen.errors import ModelWarning, RunError, TreegenError

# By title in the list of commands: name -> the help that the list shows.
_GROUPS: Final = {
    "Run": {
        "eval": "Sample a task with a model and score it.",
        "search": "Search for a task's solutions step by step, or compare search methods.",
        "plan": "Show what a run would share, store and read, without loading weights.",
        "demo": "Take a tour of treegen with the bundled model.",
    },
    "Inspect": {
        "show": "Show a run, one of its problems or one of its trees.",
        "report": "Write a page with the plots, samples and trees of runs.",
        "audit": "Find problems that may make the score of a run misleading.",
        "certify": "Write or check a certificate of how a score was computed.",
        "watch": "Show a run in the browser while it runs.",
        "compare": "Test whether one run is better than another.",
        "export": "Write a run in the format of another tool.",
        "import": "Convert another tool's log to a run.",
    },
    "Score again": {
        "score": "Score the samples of a run again, without its model.",
        "judge": "Let models grade the samples of a run by a rubric.",
        "verify": "Score the samples of a run with a reward model or verifier.",
        "usc": "Let the model pick the most consistent sample of each problem.",
        "score-texts": "Compute the log-probability of each token of given texts.",
        "replay": "Estimate what early stopping would have saved in a finished run.",
    },
    "Serve": {
        "serve": "Serve a model to OpenAI clients.",
    },
    "Information": {
        "tasks": "List the tasks, or show the arguments of one.",
        "models": "List model families, or show whether and how a checkpoint runs.",
        "power": "Compute how many problems and samples detect a difference.",
    },
    "This machine": {
        "selfcheck": "Check whether samples depend on the rest of the batch.",
        "bench": "Measure treegen's speed on this machine.",
    },
}
# The modules of commands that share one; other commands have a module of their own name.
_MODULE_OF: Final = {
    "import": "export",
    "plan": "eval",
    "replay": "score",
    "score-texts": "score",
    "selfcheck": "bench",
    "usc": "score",
    "verify": "score",
    "watch": "report",
}
_MODULES: Final = {
    name: f"treegen.cli.{_MODULE_OF.get(name, name)}"
    for group in _GROUPS.values()
    for name in group
}
_COMPLETION: Final = """\b
Shell completion, in the start file of the shell:
  bash  eval "$(_TREEGEN_COMPLETE=bash_source treegen)"
  zsh   eval "$(_TREEGEN_COMPLETE=zsh_source treegen)"
  fish  _TREEGEN_COMPLETE=fish_source treegen | source
"""

# torch's message when the host has no memory left. torch has no error class for this.
_CPU_ALLOCATOR: Final = "DefaultCPUAllocator: can't allocate memory"


class Failure(click.ClickException):
    """An error that the user can fix, in one line."""

    exit_code = 2

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the message to stderr, made safe for a terminal: it may quote any text."""
        click.echo(f"Error: {safe_text(' '.join(self.message.split()))}", file=file, err=True)


class LazyGroup(click.Group):
    """Commands that are imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of all commands, in the order of the table."""
        return [name for name, module in _MODULES.items() if find_spec(module)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; return None if there is none with the name."""
        if cmd_name not in self.list_commands(ctx):
            return None
        members = vars(import_module(_MODULES[cmd_name])).values()
        return next(m for m in members if isinstance(m, click.Command) and m.name == cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that the arguments name, or suggest similar names."""
        names = self.list_commands(ctx)
        unknown = args and args[0] not in names and not args[0].startswith("-")
        if unknown and not ctx.resilient_parsing:  # shell completion gets no message
            hint = did_you_mean(args[0], names) or f"; known: {', '.join(names)}"
            raise Failure(f"there is no command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        names = self.list_commands(ctx)
        width = max(map(len, names))
        for title, group in _GROUPS.items():
            rows = [(name.ljust(width), text) for name, text in group.items() if name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the group's own options."""
        with _in_one_line(lambda: None):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _in_one_line(lambda: self._get_invoked_command(ctx)), _warnings_in_one_line():
            return super().invoke(ctx)

    def _get_invoked_command(self, ctx: click.Context) -> click.Command | None:
        """Return the subcommand that click has resolved; None before that."""
        name = ctx.invoked_subcommand
        return None if name is None else self.get_command(ctx, name)


class OneLineCommand(click.Command):
    """A command of a script, which shows errors in one line as `treegen` does."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Parse the options."""
        with _in_one_line(lambda: self):
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with _in_one_line(lambda: self), _warnings_in_one_line():
            return super().invoke(ctx)


def script(function: Callable[..., Any]) -> OneLineCommand:
    """Return the command of a script that lies outside the package."""
    return click.command(cls=OneLineCommand, context_settings=CONTEXT)(function)


@contextmanager
def _in_one_line(command: Callable[[], click.Command | None]) -> Iterator[None]:
    """Turn errors that the user can fix into a Failure. No other place does this.

    Args:
        command: Returns the command whose flags replace argument names in messages.
    """
    try:
        yield
    except click.exceptions.NoArgsIsHelpError:
        raise
    except click.UsageError as error:
        if isinstance(error, click.NoSuchOption):
            message = describe_unknown_option(error)
        else:
            message = error.format_message().removesuffix(".") + suggest_model_option(error)
        where = f"see {error.ctx.command_path} --help" if error.ctx else ""
        raise Failure(f"{message} ({where})" if where else message) from error
    except TreegenError as error:
        raise Failure(rename_arguments(error.message, command())) from error
    except OSError as error:
        if error.filename is None:
            raise
        name, reason = str(error.filename), (error.strerror or str(error)).lower()
        short = name if len(name) <= 200 else f"{name[:100]}...{name[-60:]}"
        raise Failure(f"{short}: {reason}; check the path and its permissions") from error
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and _CPU_ALLOCATOR not in str(error):
            raise
        reason = f" ({error})" if str(error) else ""
        raise Failure(
            f"the machine has too little memory{reason}; use smaller data, a smaller --memory, "
            "--max-rows or model, or a larger machine; the finished samples of a run are stored"
        ) from error


@click.group(cls=LazyGroup, context_settings=CONTEXT, epilog=_COMPLETION)
@click.version_option(treegen.__version__, prog_name="treegen", message="%(prog)s %(version)s")
def cli() -> None:
    """Sample from language models in trees: shared prompt parts are computed and stored once."""


@contextmanager
def _warnings_in_one_line() -> Iterator[None]:
    """Print each ModelWarning as one line on stderr, and other warnings as Python does."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def one_line(
            message: Warning | str, category: type[Warning], *place: Any, **more: Any
        ) -> None:
            if issubclass(category, ModelWarning):
                click.echo(f"Warning: {safe_text(' '.join(str(message).split()))}", err=True)
            else:
                show(message, category, *place, **more)

        warnings.simplefilter("default", ModelWarning)
        warnings.showwarning = one_line
        yield


def main() -> int:
    """Run the command line; return the exit code: 0, or that of a signal."""
    with guarded_streams():
        try:
            with raising_signals():
                cli.main(prog_name="treegen")
        except Interrupted as stopped:
            click.echo(safe_text(str(stopped)), err=True)
            return stopped.exit_code
    return 0


@contextmanager
def guarded_streams() -> Iterator[None]:
    """Guard stdout and stderr, which may be closed, full, or without a reader.

    Progress goes to stderr. If it cannot be written it is dropped, because progress must never end
    a run. Results go to stdout. If they cannot be written, one line says so.
    """
    original = sys.stdout, sys.stderr
    _open_closed()
    sys.stdout = cast(TextIO, _Guarded(sys.stdout or _open_devnull(), _raise_stdout_error))
    sys.stderr = cast(TextIO, _Guarded(sys.stderr or _open_devnull(), _redirect_to_devnull))
    try:
        yield
    finally:
        sys.stdout, sys.stderr = original


class _Guarded:
    """A text stream that passes errors of writes to a function.

    Args:
        stream: The stream to write to.
        on_error: Called with the stream and the error if a write fails.
    """

    def __init__(self, stream: TextIO, on_error: Callable[[TextIO, OSError], None]) -> None:
        self._stream, self._on_error = stream, on_error

    def write(self, text: str | bytes) -> int:
        if not text:  # click first writes an empty text, and ignores errors
            return 0
        if isinstance(text, bytes):  # click writes shell completions as bytes
            text = text.decode()
        try:
            return self._stream.write(text)
        except UnicodeEncodeError:  # rich prints characters that the stream may lack
            encoding = self._stream.encoding
            return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
        except OSError as error:
            self._on_error(self._stream, error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._on_error(self._stream, error)

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":  # with a buffer click would bypass the guard
            raise AttributeError(name)
        return getattr(self._stream, name)


def _raise_stdout_error(stream: TextIO, error: OSError) -> None:
    _redirect_to_devnull(stream, error)
    if error.errno == errno.EPIPE:  # for example `treegen ... | head`; click then exits silently
        raise error
    raise RunError(
        f"cannot write to stdout: {(error.strerror or str(error)).lower()}; free disk space, or "
        "choose another file; the results of the run are stored in its directory"
    ) from error


def _redirect_to_devnull(stream: TextIO, error: OSError) -> None:
    """Point the stream's descriptor to /dev/null, so that text in its buffer raises no error."""
    with suppress(OSError, ValueError):
        fd = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(fd, stream.fileno())
        finally:
            os.close(fd)


def _open_closed() -> None:
    """Open /dev/null for closed standard streams.

    Otherwise files of a run would get descriptors 1 and 2, to which libraries write.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest descriptor that is free


def _open_devnull() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")
