"""A client of `treegen serve`: searches, samples and scores of a model on another machine.

Nothing here imports torch. RemoteLLM needs the extra `client`.

llm.py            RemoteLLM, and many searches of one call
searches.py       the event loop of searches; the server uses it too
backend.py        the backend of searches: nodes, calls and their results
step_requests.py  the calls of one step as one request
connection.py     HTTP, with retries
conversion.py     prompts, samples, scores and errors as JSON
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from treegen.integrations.client.llm import RemoteLLM as RemoteLLM
else:

    def __getattr__(name: str) -> object:
        """Import RemoteLLM on first use, because the server uses this package without `client`."""
        if name != "RemoteLLM":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from treegen.integrations.client.llm import RemoteLLM

        return RemoteLLM
