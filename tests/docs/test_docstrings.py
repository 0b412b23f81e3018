"""Docstrings of public names have one form: a verb first, then arguments, then Raises."""

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import treegen

# What a call does, in the imperative. A name of a thing is for properties and classes.
_VERBS = re.compile(
    "(Add|Assert|Begin|Cancel|Check|Close|Compile|Compute|Count|Discard|Drop|End|Forget|Generate"
    "|Have|Judge|Keep|Load|Make|Raise|Read|Record|Remember|Return|Run|Sample|Score|Search|Start|Stop"
    "|Take|Wrap|Write|Yield)\\b"
)


def _calls() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield the public functions, and the public methods of public classes, with their names."""
    for name in treegen.__all__:
        found = getattr(treegen, name)
        if inspect.isfunction(found):
            yield name, found
        if found in (treegen.LLM, treegen.AsyncLLM, treegen.Cluster):
            yield f"{name}.__init__", found.__init__
        if not inspect.isclass(found) or not found.__module__.startswith("treegen"):
            continue
        for key, member in inspect.getmembers(found, callable):
            is_ours = (getattr(member, "__module__", None) or "").startswith("treegen")
            if not key.startswith("_") and is_ours and not inspect.isclass(member):
                yield f"{name}.{key}", member


@pytest.mark.parametrize(("name", "call"), [pytest.param(*each, id=each[0]) for each in _calls()])
def test_a_docstring_begins_with_a_verb_and_ends_with_its_errors(
    name: str, call: Callable[..., Any]
) -> None:
    text = inspect.getdoc(call) or ""
    assert _VERBS.match(text), text[:80]
    assert not re.search(r"^(Raises|Returns|Args|Yields)\b(?!:$)", text, re.MULTILINE), text
    before, raises, errors = text.partition("\nRaises:\n")
    assert not raises or re.fullmatch(r"( {4}\w+: .+(\n {5,}.+)*\n?)+", errors), errors
    # An argument is told as "name: what it is", where the reference makes items of such sentences.
    known = set(inspect.signature(call).parameters) - {"self"}
    listed = re.findall(r"(?:^|[.;)] )((?:[a-z_]+, )*[a-z_]+): ", before, re.MULTILINE)
    documented = {each for names in listed for each in names.split(", ")}
    near = {
        each for each in documented - known if any(each.rstrip("s") == k.rstrip("s") for k in known)
    }
    assert not near, f"{name} tells {near}, and takes {known}"


def _functions(node: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield the public functions and methods of a syntax tree, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if not child.name.startswith("_"):
                yield child
        else:
            yield from _functions(child)


def _missing_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Return the parameters that the Args section of a function with three or more leaves out."""
    arguments = function.args
    every = (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
    names = [argument.arg for argument in every if argument.arg not in ("self", "cls")]
    _, _, section = (ast.get_docstring(function) or "").partition("Args:\n")
    return [
        name
        for name in names
        if len(names) > 2 and not re.search(rf"^ +\*{{0,2}}{name}\b.*:", section, re.MULTILINE)
    ]


@pytest.mark.parametrize("folder", ["treegen", "tasks"])
def test_functions_document_all_parameters(repository: Path, folder: str) -> None:
    """Commands are left out, because their docstrings are help texts."""
    links = (repository / folder / "tasks", repository / folder / "cli")
    missing = {
        f"{path.relative_to(repository)}:{function.name}": names
        for path in (repository / folder).rglob("*.py")
        if not any(link in path.parents for link in links)
        for function in _functions(ast.parse(path.read_text(encoding="utf-8")))
        if not any("overload" in ast.unparse(each) for each in function.decorator_list)
        if (names := _missing_parameters(function))
    }
    assert missing == {}
