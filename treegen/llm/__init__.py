"""LLM: one model, its cache and the calls that sample; AsyncLLM: the same for many callers.

llm.py, base.py  the calls of one caller; search/search_calls.py has those that search
arguments.py     arguments of the calls, in the forms that other tools accept too
follower.py      the other ranks of a model that is split across GPUs
async_llm.py     calls that callers in event loops await, and the limit on waiting samples
encoder.py       the threads that encode prompts in order of arrival
engine_loop.py   the thread that owns the LLM and runs its steps
cluster/         workers, each with its own LLM, that share every run
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.llm.llm import LLM as LLM
else:

    def __getattr__(name: str) -> object:
        """Import LLM on first use, because workers start without torch."""
        if name != "LLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from treegen.llm.llm import LLM

        return LLM
