"""The entry point that Inspect loads; torch is imported with the first model."""

from inspect_ai.model import ModelAPI, modelapi


@modelapi("treegen")
def treegen() -> type[ModelAPI]:
    """Return the model provider of `--model treegen/DIR`."""
    from treegen.integrations.inspect_ai.provider import TreegenAPI

    return TreegenAPI
