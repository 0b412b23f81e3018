"""The OpenAPI document of the routes of nodes, generated from the models of the protocol."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from treegen.common.version import VERSION
from treegen.integrations.nodes import protocol

_ERRORS: Final = {
    "400": "The request cannot be used.",
    "401": "The API key is missing or wrong.",
    "403": "A server without API keys answers only at its IP address or as localhost.",
    "404": "There is no such node.",
    "408": "The body did not arrive in time.",
    "409": "The idempotency key was used for another request.",
    "413": "The body is too large.",
    "415": "The content type is not application/json.",
    "429": "The client is at a limit, or too many samples wait.",
    "500": "The server failed.",
    "503": "The server is stopping.",
}


_SEARCH: Final = "/v1/search/{method}/chat/completions"


class _Route(NamedTuple):
    path: str
    method: str
    name: str
    summary: str
    body: type[BaseModel] | None
    answer: type[BaseModel]


ROUTES: Final = (
    _Route("/v1/nodes", "get", "list_trees", "List trees", None, protocol.TreeList),
    _Route(
        "/v1/nodes",
        "post",
        "create_root",
        "Create a root",
        protocol.RootRequest,
        protocol.NodeResult,
    ),
    _Route(
        "/v1/nodes/batch",
        "post",
        "run_batch",
        "Run several operations",
        protocol.BatchRequest,
        protocol.BatchAnswer,
    ),
    _Route("/v1/nodes/{id}", "get", "read_node", "Read a node", None, protocol.ReadResult),
    _Route("/v1/nodes/{id}", "delete", "drop_node", "Drop a subtree", None, protocol.DropResult),
    _Route(
        "/v1/nodes/{id}/sample",
        "post",
        "sample_children",
        "Sample children",
        protocol.NodeSampleRequest,
        protocol.SampleResult,
    ),
    _Route(
        "/v1/nodes/{id}/extend",
        "post",
        "extend_node",
        "Append given text",
        protocol.ExtendRequest,
        protocol.NodeResult,
    ),
    _Route(
        "/v1/nodes/{id}/score",
        "post",
        "score_texts",
        "Score continuations",
        protocol.NodeScoreRequest,
        protocol.ScoreResult,
    ),
)
"""The routes of nodes; `NodeRoutes` has their handlers."""


@functools.cache
def make_openapi(*, searches: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        searches: Whether the server answers chats by searches. Default: False.
    """
    models: set[type[BaseModel]] = {protocol.ErrorAnswer, protocol.Event}
    for route in ROUTES:
        models |= {model for model in (route.body, route.answer) if model is not None}
    requests = {route.body for route in ROUTES}
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema(
        [(model, "validation" if model in requests else "serialization") for model in ordered],
        ref_template="#/components/schemas/{model}",
    )
    paths: dict[str, Any] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method] = _describe_route(route)
    if searches:
        paths[_SEARCH] = {"post": _describe_search()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "treegen nodes", "version": VERSION, "description": protocol.__doc__},
        "paths": paths,
        "components": {
            "schemas": schemas["$defs"],
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _describe_route(route: _Route) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    if "{id}" in route.path:
        parameters.append(_describe_path("id"))
    if route.method == "post":
        parameters.append(
            {
                "name": protocol.IDEMPOTENCY_HEADER,
                "in": "header",
                "required": False,
                "schema": {"type": "string", "maxLength": 255},
                "description": "If the request is sent again with this key, the server returns the "
                "stored response.",
            }
        )
    answers = {"application/json": _reference(route.answer)}
    if route.body is protocol.NodeSampleRequest:
        answers["text/event-stream"] = _reference(protocol.Event)
    body = _reference(route.body) if route.body is not None else None
    return _describe_operation(route.name, route.summary, parameters, body, answers)


def _describe_search() -> dict[str, Any]:
    """Return the description of the searches, whose bodies and answers are those of OpenAI."""
    any_object = {"type": "object"}
    return _describe_operation(
        "search_chat",
        "Answer a chat by a search; a request of /v1/chat/completions with `search`",
        [_describe_path("method")],
        any_object,
        {"application/json": any_object, "text/event-stream": any_object},
    )


def _describe_operation(
    name: str,
    summary: str,
    parameters: Sequence[dict[str, Any]],
    body: dict[str, str] | None,
    answers: dict[str, dict[str, str]],
) -> dict[str, Any]:
    """Return the description of an operation.

    Args:
        name: Its id.
        summary: A few words on what it does.
        parameters: Its parameters in the path and the header.
        body: The schema of its body; None for an operation without one.
        answers: The schema of its answer, by media type.
    """
    content = {kind: {"schema": schema} for kind, schema in answers.items()}
    description: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "The result.", "content": content},
            **_describe_errors(),
        },
    }
    if body is not None:
        description["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": body}},
        }
    return description


def _describe_path(name: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}


def _describe_errors() -> dict[str, Any]:
    return {
        status: {
            "description": description,
            "content": {"application/json": {"schema": _reference(protocol.ErrorAnswer)}},
        }
        for status, description in _ERRORS.items()
    }


def _reference(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{model.__name__}"}
