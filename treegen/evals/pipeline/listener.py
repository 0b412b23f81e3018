"""Who is told how runs go, and how Ctrl-C ends them: nobody, or a bar in a notebook or a script."""

import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.evals.config.base import BaseSettings
    from treegen.evals.progress.run_progress import RunProgress

Stop = Callable[[], object]
Follow = Callable[[Callable[[Stop], Iterable[tuple[int, int]]], str], tuple[int, int]]
"""Uses up what yields (done, planned) while it may be stopped; takes the unit too."""


class Listener:
    """Is told how runs go. This one hears nothing, and lets them go on."""

    def warn(self, text: str) -> None:
        """Take a line on what may surprise the user."""

    def tell(self, text: str) -> None:
        """Take a line on what goes as it should."""

    def loading(self, model: str) -> None:
        """Note that a model is about to be loaded."""
        self.tell(f"loading {model}")

    def show_prompt(self, text: str) -> None:
        """Take the first prompt of a run."""

    def track(self, steps: "Iterator[RunProgress]", title: str) -> None:
        """Use up the steps of a run."""
        for _ in steps:
            pass

    def poll_interrupts(self) -> AbstractContextManager[Stop]:
        """Enter while samples are drawn; what it gives is polled, and ends them once it is true."""
        return interruptible()

    def resume_command(self, path: Path | str, settings: "Sequence[BaseSettings]") -> str:
        """Return how the user continues the run in a directory. settings: of all runs there."""
        code = ", allow_task_code=True" if any(each.runs_code for each in settings) else ""
        return f"continue with resume={str(path)!r}{code}"


class BarListener(Listener):
    """Prints warnings to stderr, and draws a bar: in a notebook a widget."""

    def warn(self, text: str) -> None:
        """Print a line."""
        from tqdm.auto import tqdm

        tqdm.write(text, file=sys.stderr)

    def tell(self, text: str) -> None:
        """Print a line."""
        self.warn(text)

    def track(self, steps: "Iterator[RunProgress]", title: str) -> None:
        """Use up the steps of a run, with a bar of its samples or searches."""
        from tqdm.auto import tqdm

        bar = None
        for now in steps:
            if bar is None:
                bar = tqdm(desc=title, total=now.planned, initial=now.started, unit=f" {now.unit}")
            bar.total = now.planned
            bar.update(now.done - bar.n)
            told = {"tokens/s": f"{now.tokens_per_second:,.0f}"} if now.num_pages else {}
            if now.estimate is not None:
                told["accuracy"] = f"{now.estimate.value:.3f}"
            bar.set_postfix(told, refresh=False)
        if bar is not None:
            bar.close()


@contextmanager
def interruptible() -> Iterator[Stop]:
    """Yield whether Ctrl-C was pressed; at the end it raises KeyboardInterrupt, as is usual.

    So what a step has drawn is stored first. Pressed again, Ctrl-C interrupts at once. Outside the
    main thread, where Python allows no handlers, it is never told.
    """
    came = threading.Event()
    before = signal.getsignal(signal.SIGINT)
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or before is not signal.default_int_handler:
        yield came.is_set  # somebody else decides what Ctrl-C does
        return

    def on_signal(signum: int, frame: FrameType | None) -> None:
        came.set()
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, on_signal)
    try:
        yield came.is_set
    finally:
        signal.signal(signal.SIGINT, before)
    if came.is_set():
        raise KeyboardInterrupt
