"""treegen as a model provider of Inspect AI: `--model treegen/DIR`. Needs the extra `inspect`.

Inspect finds it by the entry point in pyproject.toml.

entry.py       the entry point
provider.py    the model: concurrent generations of Inspect are sampled together
conversion.py  converts messages, tools and settings for treegen, and completions for Inspect
"""
