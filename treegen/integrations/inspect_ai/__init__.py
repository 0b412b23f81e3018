"""treegen as a model of Inspect AI: `--model treegen/DIR`; sandboxes of Inspect for agents.

Needs the extra `inspect`.

Inspect finds it by the entry point in pyproject.toml.

entry.py          the entry point
provider.py       the model: concurrent generations of Inspect are sampled together
conversion.py     converts messages, tools and settings for treegen, and completions for Inspect
environment.py    worlds of agents in Inspect's sandboxes
docker_images.py  images of docker that snapshots are stored as
"""
