"""Errors and bodies of OpenTinker's routes: ``{"detail": text}``, or a list of what is wrong in a body."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from fray.tinker.core.limits import limit_text
from fray.tinker.wire.tinker_json import parsed_json

Answer: TypeAlias = Response | dict[str, Any] | None
"""Answer of a handler: a response, an object that is sent as JSON, or None: 204, without a body."""


def response_of(answer: Answer) -> Response:
    """Return the response of an answer."""
    if isinstance(answer, Response):
        return answer
    return Response(status_code=204) if answer is None else JSONResponse(answer)


class Unprocessable(Exception):
    """Body of another form than a route has.

    Args:
        problems: each with ``type``, ``loc``, ``msg`` and ``input``.
    """

    def __init__(self, problems: list[dict[str, Any]]) -> None:
        super().__init__(str(problems))
        self.problems = problems


async def body_of(request: Request, limit: int) -> bytes:
    """Return the body of a request. Raises HTTPException 413 if it has more than ``limit`` bytes."""
    parts, size = [], 0
    async for part in request.stream():
        parts.append(part)
        size += len(part)
        if size > limit:
            raise HTTPException(413, limit_text("the body is too long", "body_bytes", limit))
    return b"".join(parts)


async def json_of(request: Request, limit: int) -> dict[str, Any]:
    """Return the object in the body of a request. Raises Unprocessable if there is none; as `body_of`."""
    try:
        value = parsed_json(await body_of(request, limit))
    except (ValueError, RecursionError) as error:
        raise Unprocessable([_problem("json_invalid", [], f"JSON decode error: {error}", {})]) from None
    if not isinstance(value, dict):
        raise Unprocessable([_problem("model_attributes_type", [], "Input should be an object", value)])
    return value


def _problem(kind: str, place: list[str], text: str, value: Any) -> dict[str, Any]:
    try:
        json.dumps(value, allow_nan=False)
    except ValueError:
        # Python reads numbers as JSON that are not to be written as such: infinity, NaN.
        value = repr(value)
    return {"type": kind, "loc": ["body", *place], "msg": text, "input": value}


_KINDS: dict[str, tuple[type | tuple[type, ...], str, str]] = {
    "dict": (dict, "dict_type", "Input should be a valid dictionary"),
    "str": (str, "string_type", "Input should be a valid string"),
    "int": (int, "int_type", "Input should be a valid integer"),
    "float": ((int, float), "float_type", "Input should be a valid number"),
    "bool": (bool, "bool_type", "Input should be a valid boolean"),
}


def fields_of(body: Mapping[str, Any], **fields: str) -> dict[str, Any]:
    """Return the fields of a body; ``name="int"`` is required, ``name="int?"`` may be missing or null.

    Raises:
        Unprocessable: a field is missing or of another kind; all of them are in it.
    """
    problems: list[dict[str, Any]] = []
    found: dict[str, Any] = {}
    for name, wanted in fields.items():
        kind, code, text = _KINDS[wanted.rstrip("?")]
        value = body.get(name)
        if value is None and wanted.endswith("?"):
            found[name] = None
        elif name not in body:
            problems.append(_problem("missing", [name], "Field required", dict(body)))
        elif not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
            problems.append(_problem(code, [name], text, value))
        else:
            found[name] = value
    if problems:
        raise Unprocessable(problems)
    return found


async def refuse(request: Request, error: Exception) -> Response:
    """Return the answer for an HTTPException."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, headers=error.headers)


async def refuse_store(request: Request, error: Exception) -> Response:
    """Return the answer for a StoreFailed: the request was not accepted, and may be sent again."""
    return JSONResponse({"detail": str(error)}, 503)


async def refuse_job(request: Request, error: Exception) -> Response:
    """Return the answer for a JobRefused."""
    return JSONResponse({"detail": str(error)}, 400)


async def refuse_body(request: Request, error: Exception) -> Response:
    """Return the answer for a body of another form."""
    assert isinstance(error, Unprocessable)
    return JSONResponse({"detail": error.problems}, 422)
