"""A client of `treegen serve`: searches, samples and scores of a model on another machine.

Nothing here imports torch. Needs the extra `client`.
"""

from treegen.integrations.client.llm import RemoteLLM as RemoteLLM
