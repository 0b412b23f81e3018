"""Tools as chat templates and APIs take them."""

from collections.abc import Mapping
from typing import Any


def tool(name: str, properties: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return a tool whose arguments have these schemas; `more` is further part of its schema."""
    parameters = {"type": "object", "properties": dict(properties), **more}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


INTEGER = {"type": "integer"}
ADD = [tool("add", {"x": INTEGER, "y": INTEGER})]
