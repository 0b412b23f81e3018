"""The documents of lm-eval's tasks as JSON, and the questions in them."""

import json
from typing import Any, Final, Protocol, runtime_checkable

from treegen.common.formatting import replace_surrogates
from treegen.evals.config.eval_settings import EvalSettings

# Fields of a document that may hold the question, most likely first.
_QUESTIONS: Final = ("question", "query", "problem", "prompt", "input", "sentence", "text", "ctx")


@runtime_checkable
class TaskWithDocuments(Protocol):
    """A task of lm-eval, which has the documents that lm-eval logs."""

    def get_documents(self) -> dict[str, Any]:
        """Return the document of each problem, by its id."""

    def log_documents(self, settings: EvalSettings) -> dict[str, dict[str, Any]]:
        """Return what lm-eval logs of each problem, by its id.

        Args:
            settings: The settings of the run.
        """

    def log_groups(self) -> dict[str, list[str]]:
        """Return the tasks of each group."""


def dump_document(value: object, indent: int | None = None) -> str:
    """Return a document, or other content of a log, as JSON, as lm-eval writes it.

    Args:
        value: The document.
        indent: As for `json.dumps`.
    """
    text = json.dumps(value, indent=indent, default=_plain, ensure_ascii=False)
    return replace_surrogates(text)


def _plain(value: Any) -> object:
    """Return a value of a document that JSON lacks in the way that lm-eval writes it."""
    if isinstance(value, set):
        return list(value)
    is_scalar = type(value).__module__ == "numpy" and hasattr(value, "item")
    return value.item() if is_scalar and getattr(value, "ndim", None) == 0 else str(value)


def describe_document(doc: Any) -> str:
    """Return the question of a document, or the whole document if no field is known to have it.

    Args:
        doc: The document, as JSON has it.
    """
    doc = doc if isinstance(doc, dict) else {"text": str(doc)}
    question = next((doc[name] for name in _QUESTIONS if isinstance(doc.get(name), str)), None)
    return json.dumps(doc, sort_keys=True) if question is None else question
