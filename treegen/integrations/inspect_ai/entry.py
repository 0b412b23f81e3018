"""What Inspect loads by the entry point; torch is loaded with the first model."""

from inspect_ai.model import ModelAPI, modelapi


@modelapi("treegen")
def treegen() -> type[ModelAPI]:
    """The model provider of `--model treegen/DIR`."""
    from treegen.integrations.inspect_ai.provider import TreegenAPI

    return TreegenAPI
