"""A client of `treegen serve`: searches, samples and scores of a model on another machine.

Nothing here imports torch. Needs the extra `client`.

llm.py            RemoteLLM
search_run.py     many searches of one call
searches.py       the event loop of searches; the server uses it too
backend.py        the backend of searches: nodes, calls and their results
step_requests.py  the calls of one step as one request
connection.py     HTTP, with repetitions
conversion.py     prompts, samples, scores and errors as JSON
"""

from treegen.integrations.client.llm import RemoteLLM as RemoteLLM
