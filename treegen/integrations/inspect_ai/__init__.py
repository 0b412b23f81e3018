"""treegen as a model provider of Inspect AI: `--model treegen/DIR`. Needs the extra `inspect`.

Inspect finds it by the entry point in pyproject.toml.

entry.py     the entry point
provider.py  the model: concurrent generations of Inspect are sampled together
messages.py  converts Inspect's messages and tools for chat templates
settings.py  converts Inspect's settings to sampling parameters; unsupported ones are errors
outputs.py   converts completions to Inspect's outputs
"""
