"""Listeners for run progress (silent, or a progress bar), and Ctrl-C handling."""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Final

from treegen.common.progress import load_tqdm

if TYPE_CHECKING:
    from treegen.evals.config.base import BaseSettings
    from treegen.evals.progress.run_progress import RunProgress

# tqdm's own time left counts samples, and samples that start together end together.
_BAR: Final = "{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{unit} [{elapsed}{postfix}]"
Stop = Callable[[], object]
Follow = Callable[[Callable[[Stop], Iterable[tuple[int, int]]], str], tuple[int, int]]
"""Consumes an iterator of (done, planned) that may be stopped; its second argument is the unit."""


class Listener:
    """Receives progress and messages of runs. This base class ignores them and never stops runs."""

    def warn(self, text: str) -> None:
        """Receive a warning."""

    def tell(self, text: str) -> None:
        """Receive a message about normal progress."""

    def loading(self, model: str) -> None:
        """Receive the name of a model that is about to be loaded."""
        self.tell(f"loading {model}")

    def show_prompt(self, text: str) -> None:
        """Receive the first prompt of a run."""

    def track(self, steps: "Iterator[RunProgress]", title: str) -> None:
        """Consume the steps of a run."""
        for _ in steps:
            pass

    def poll_interrupts(self) -> AbstractContextManager[Stop]:
        """Return a context for sampling; it yields a function that returns whether to stop."""
        return interruptible()

    def resume_command(self, path: Path | str, settings: "Sequence[BaseSettings]") -> str:
        """Return how the user resumes the run in a directory.

        Args:
            path: The directory of the run, or of several runs.
            settings: The settings of all runs in the directory.
        """
        code = ", allow_task_code=True" if any(s.runs_code for s in settings) else ""
        return f"continue with resume={str(path)!r}{code}"


class BarListener(Listener):
    """Prints warnings to stderr and draws a progress bar, in a notebook as a widget."""

    def warn(self, text: str) -> None:
        """Print a line."""
        load_tqdm().write(text, file=sys.stderr)

    def tell(self, text: str) -> None:
        """Print a line."""
        self.warn(text)

    def track(self, steps: "Iterator[RunProgress]", title: str) -> None:
        """Consume the steps of a run, with a bar of its samples or searches."""
        bar = None
        for now in steps:
            if bar is None:
                bar = load_tqdm()(
                    desc=title,
                    total=now.planned,
                    initial=now.started,
                    unit=f" {now.unit}",
                    bar_format=_BAR,
                )
            bar.total = now.planned
            bar.update(now.done - bar.n)
            parts = [f"tokens/s={now.tokens_per_second:,.0f}"] if now.num_pages else []
            if now.estimate is not None:
                name = "solved" if now.unit == "searches" else "accuracy"
                parts.append(f"{name}={now.estimate.value:.3f}")
            bar.set_postfix_str(", ".join(filter(None, (*parts, now.time_left))), refresh=False)
        if bar is not None:
            bar.close()


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Yield a function that returns whether Ctrl-C was pressed; raise KeyboardInterrupt at the end.

    So the results of the current step are stored first. A second Ctrl-C interrupts at once. The
    function always returns False outside the main thread, where Python allows no signal handlers,
    and if the program has installed its own handler of SIGINT.
    """
    interrupted = threading.Event()
    previous = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or previous is not signal.default_int_handler:
        yield interrupted.is_set  # another handler is installed, or this thread cannot install one
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted.is_set
    finally:
        signal.signal(signal.SIGINT, previous)
    if interrupted.is_set():
        raise KeyboardInterrupt
