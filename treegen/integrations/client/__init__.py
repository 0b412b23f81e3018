"""A client of `treegen serve`: searches, samples and scores of a model on another machine.

Nothing here imports torch. Needs the extra `client`.

llm.py         RemoteLLM, and many searches of one call
connection.py  HTTP, with retries
conversion.py  prompts, samples and scores as JSON
"""

from treegen.integrations.client.llm import RemoteLLM as RemoteLLM
