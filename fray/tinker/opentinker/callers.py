"""Callers of routes: the user of a request's key."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from fray.tinker.core.keys import ServiceUser
from fray.tinker.opentinker.answers import Answer, response_of
from fray.tinker.service_jobs import ServiceJobs

ForUser: TypeAlias = Callable[[Request, ServiceUser], Awaitable[Answer]]
"""Handler of a route, with the caller."""


def for_user(jobs: ServiceJobs, handler: ForUser, *, admin: bool = False) -> Callable[[Request], Awaitable[Response]]:
    """Return an endpoint whose caller is known before its body is looked at."""

    async def checked(request: Request) -> Response:
        user = user_of(request, jobs)
        if admin and not user.is_admin:
            raise HTTPException(403, "Admin access required")
        return response_of(await handler(request, user))

    return checked


def user_of(request: Request, jobs: ServiceJobs) -> ServiceUser:
    """Return the caller. Raises HTTPException 401."""
    if not jobs.has_auth:
        return jobs.anonymous
    header = request.headers.get("authorization")
    if header is None:
        raise HTTPException(401, "Authorization header required")
    scheme, _, key = header.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise HTTPException(401, "Invalid authorization header format")
    user = jobs.user_of_key(key.strip())
    if user is None:
        raise HTTPException(401, "Invalid API key")
    return user
