"""treegen as a model provider of Inspect AI: `--model treegen/DIR`. Needs the extra `inspect`.

Inspect finds it by the entry point in pyproject.toml.

entry.py     the entry point
provider.py  the model: what Inspect asks for at the same time is sampled together
messages.py  Inspect's messages and tools as chat templates take them
settings.py  Inspect's settings as sampling parameters; what cannot be honoured is refused by name
outputs.py   completions as Inspect's outputs
"""
