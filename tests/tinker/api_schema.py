"""Description of the service's routes in OpenAPI: of each route and method, with bodies as examples have them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

KEPT = {"session_id", "model_id", "request_id", "tinker_path", "base_model", "model_path", "path", "model"}
"""Fields whose value is the name of something that is there: another one is answered 404."""
_KINDS: dict[type, str] = {bool: "boolean", int: "integer", float: "number", str: "string"}
_JSON = {"application/json": {"schema": {"type": "object"}}}
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_REFUSED = {
    "description": "refused, with the reason",
    "content": {
        "application/json": {
            "schema": {"type": "object", "anyOf": [{"required": ["detail"]}, {"required": ["error"]}]},
        }
    },
}


def openapi_of(
    routes: Iterable[tuple[str, str]], bodies: Mapping[str, dict[str, Any]], paths: Mapping[str, str]
) -> dict[str, Any]:
    """Return the description.

    Args:
        routes: method and path of each, the latter as Starlette has it.
        bodies: an example for each route that takes one, by method and path.
        paths: value of each parameter of a path, by its name with its convertor.
    """
    described: dict[str, dict[str, Any]] = {}
    for method, path in routes:
        names = re.findall(r"{([^}]+)}", path)
        operation: dict[str, Any] = {
            "operationId": f"{method} {path}",
            "parameters": [
                {
                    "name": name.partition(":")[0],
                    "in": "path",
                    "required": True,
                    "schema": {"type": "string", "enum": [paths[name]]},
                }
                for name in names
            ],
            "responses": {
                "200": {"description": "done", "content": _JSON | (_STREAM if path.endswith("completions") else {})},
                "204": {"description": "done"},
                "4XX": _REFUSED,
            },
        }
        if (body := bodies.get(f"{method} {path}")) is not None:
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema_of(body)}}}
        described.setdefault(re.sub(r":[a-z]+}", "}", path), {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "fray.tinker", "version": "0"},
        "paths": described,
        # Two spellings of one key: OpenTinker's and the Tinker API's.
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
            }
        },
    }


def schema_of(example: Any, name: str = "") -> dict[str, Any]:
    """Return the schema of values like an example: all fields of an object, numbers up to twice the example's."""
    if isinstance(example, dict):
        fields = {key: schema_of(value, key) for key, value in example.items()}
        return {"type": "object", "properties": fields, "required": list(fields)}
    if isinstance(example, list):
        return {"type": "array", "items": schema_of(example[0]) if example else {}, "maxItems": 4}
    if example is None:
        return {"type": "null"}
    if name in KEPT:
        return {"type": "string", "enum": [example]}
    of_kind = {"type": _KINDS[type(example)], "example": example}
    return of_kind if isinstance(example, bool | str) else {**of_kind, "minimum": 0, "maximum": max(8, 2 * example)}
