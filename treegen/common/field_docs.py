"""Class docstrings that list the docstrings of fields, for `help`."""

from __future__ import annotations


class FieldDocs:
    """A docstring of a dataclass that ends with the strings below the fields in the source.

    Python does not keep these strings, so they are read from the source, and only when a program
    asks for the docstring.
    """

    def __init__(self, summary: str | None) -> None:
        """Create the docstring.

        Args:
            summary: The docstring in the source.
        """
        self._summary = summary or ""

    def __get__(self, instance: object, owner: type) -> str:
        from inspect import cleandoc

        fields = "".join(f"\n    {name}: {text}" for name, text in _read_field_docs(owner).items())
        return cleandoc(self._summary) + (f"\n\nAttributes:{fields}\n" if fields else "")


def list_fields(kind: type) -> None:
    """Make the docstring of a dataclass list the fields."""
    if not isinstance(vars(kind).get("__doc__"), FieldDocs):
        kind.__doc__ = FieldDocs(kind.__doc__)  # type: ignore[assignment]


def _read_field_docs(kind: type) -> dict[str, str]:
    """Return the strings below the fields of a class, each as one paragraph.

    The result is empty if there is no source.
    """
    import ast
    import inspect
    from itertools import pairwise
    from textwrap import dedent, fill

    try:
        (node,) = ast.parse(dedent(inspect.getsource(kind))).body
    except (OSError, TypeError, SyntaxError):
        return {}
    docs = {}
    for field, below in pairwise(node.body if isinstance(node, ast.ClassDef) else ()):
        if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split())
            name = field.target.id
            lead = " " * (len(name) + len("    : "))
            filled = fill(text, 100, initial_indent=lead, subsequent_indent=" " * 8)
            docs[name] = filled[len(lead) :]
    return docs
