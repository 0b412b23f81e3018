"""Arguments that are written as text, converted to the types that a tool declares."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from treegen.prompts.grammar_termination import resolve_reference
from treegen.prompts.replies.scan import NotACall

_TYPES: Final = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "dict": "object",
    "list": "array",
    "tuple": "array",
    "none": "null",
    "NoneType": "null",
}
_INTEGER: Final = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER: Final = re.compile(r"[+-]?[0-9.]{1,400}([eE][+-]?[0-9]{1,4})?")
_LITERALS: Final = {"true": True, "false": False, "null": None}
_WORDS: Final = {"True": True, "False": False, "None": None}  # some templates write these


class ToolSchemas:
    """The parameter schemas of some tools.

    Args:
        tools: In the form of chat templates, or None.
    """

    def __init__(self, tools: Sequence[Any] | None) -> None:
        self._schemas: dict[str, Mapping[str, Any]] = {}
        for tool in tools or ():
            definition = _schema_of_function(tool) if callable(tool) else tool
            if not isinstance(definition, Mapping):
                continue
            function = definition.get("function", definition)
            if isinstance(function, Mapping) and isinstance(function.get("name"), str):
                schema = function.get("parameters") or function.get("input_schema")
                self._schemas[function["name"]] = schema if isinstance(schema, Mapping) else {}

    def parse_argument(self, function: str, name: str, text: str) -> Any:
        """Return the value of an argument that is written as text.

        If the tool declares a type and the text can be read as that type, the value has that type;
        if it cannot, the value is the text. Without a declared type, JSON text becomes its value,
        because chat templates write values other than strings as JSON.

        Args:
            function: The name of the tool.
            name: The name of the parameter.
            text: The argument's text.
        """
        schema = self._schemas.get(function, {})
        properties = schema.get("properties")
        argument_schema = properties.get(name) if isinstance(properties, Mapping) else None
        types = _types(argument_schema, schema)
        if not types:
            return from_json(text)
        for kind in ("null", "boolean", "integer", "number", "object", "array"):
            if kind in types and (value := _READERS[kind](text.strip())) is not _INVALID:
                return value
        return text


def _schema_of_function(tool: Callable[..., Any]) -> Any:
    from transformers.utils import get_json_schema

    try:
        return get_json_schema(tool)
    except Exception:  # a chat template that reads the tool has reported the error already
        return None


def _types(schema: Any, root_schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows; empty if it does not say."""
    types: set[str] = set()
    pending, visited = [schema], set()
    while pending:
        part = pending.pop()
        if not isinstance(part, Mapping) or id(part) in visited:
            continue
        visited.add(id(part))  # a schema may refer to itself
        types |= _declared_types(part)
        for name in ("anyOf", "oneOf", "allOf"):
            options = part.get(name)
            pending += options if isinstance(options, list) else ()
        if isinstance(reference := part.get("$ref"), str):
            pending.append(resolve_reference(reference, root_schema))
    return types


def _declared_types(schema: Mapping[str, Any]) -> set[str]:
    """Return the JSON types of a schema's own `type`, or else of its `enum`."""
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    names = declared if isinstance(declared, list | tuple) else ()
    types = {_TYPES.get(kind.lower(), kind.lower()) for kind in names if isinstance(kind, str)}
    if not types and isinstance(schema.get("enum"), list):
        types = {_TYPES.get(type(value).__name__, "string") for value in schema["enum"]}
    return types


_INVALID: Final = object()


def from_json(text: str) -> Any:
    """Return the value of a JSON text or of True, False or None; else the text itself."""
    value = _from_json(text)
    return _WORDS.get(text.strip(), text) if value is _INVALID else value


def _from_json(text: str) -> Any:
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)
        return value
    except (ValueError, RecursionError):
        return _INVALID


def _literal(text: str, kind: type) -> Any:
    """Return a container written as JSON or in Python."""
    value = _from_json(text)
    if value is _INVALID:
        try:
            value = plain_value(ast.parse(text, mode="eval").body)
        except (SyntaxError, ValueError, RecursionError, MemoryError, NotACall):
            return _INVALID
    return value if isinstance(value, kind) else _INVALID


def _number(text: str) -> Any:
    if _INTEGER.fullmatch(text):
        return int(text)
    try:
        value = float(text) if _NUMBER.fullmatch(text) else math.nan
    except ValueError:
        return _INVALID
    return value if math.isfinite(value) else _INVALID


_READERS: Final[dict[str, Callable[[str], Any]]] = {
    "null": lambda text: None if text in ("null", "None") else _INVALID,
    "boolean": lambda text: {"true": True, "false": False}.get(text.lower(), _INVALID),
    "integer": lambda text: int(text) if _INTEGER.fullmatch(text) else _INVALID,
    "number": _number,
    "object": lambda text: _literal(text, dict),
    "array": lambda text: _literal(text, list),
}


def plain_value(node: ast.expr) -> Any:
    """Return the value of a Python literal that JSON can express; nothing is evaluated.

    Raises:
        NotACall: it is not such a literal.
    """
    match node:
        case ast.Constant(value=value) if value is None or isinstance(value, bool | int | str):
            return value
        case ast.Constant(value=float(value)) if math.isfinite(value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = plain_value(operand)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return -value
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [plain_value(element) for element in elements]
        case ast.Dict(keys=keys, values=values):
            names = [None if key is None else plain_value(key) for key in keys]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(plain_value, values), strict=True))
        case ast.Name(id=name) if name in _LITERALS:
            return _LITERALS[name]
    raise NotACall("no literal")
