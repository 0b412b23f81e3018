"""treegen as a model of lm-evaluation-harness: importing this registers `--model treegen`.

Versions of lm-eval that look for plug-ins find it by the entry point in pyproject.toml. For other
versions, `python -m treegen.integrations.lm_eval` is lm-eval's own command with the model
registered.
"""

try:
    # This fills the registry of models, which lm-eval itself does only while it is empty.
    import lm_eval.models  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("lm_eval", "lm_eval.models"):
        raise
    from treegen.errors import install

    raise ModuleNotFoundError(
        f"treegen.integrations.lm_eval needs lm-evaluation-harness: {install('lm-eval')}",
        name="lm_eval",
    ) from None

from lm_eval.api.registry import model_registry

from treegen.integrations.lm_eval.model import TreegenLM

__all__ = ["TreegenLM"]

# If lm-eval imported this by the entry point, the name is registered already.
if "treegen" not in model_registry:
    model_registry.register("treegen", target=TreegenLM)
