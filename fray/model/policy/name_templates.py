"""Name templates: ``{user}/rl/rollout/{index:03d}``. Pure."""

from __future__ import annotations

import re
from string import Formatter

from fray.errors import InvalidRequest
from fray.model.ids import check_name

INSTANCES_LIMIT = 10_000
"""Limit of jobs of one launch."""
_INDEX = re.compile(r"(0?[1-9])?d?\Z")
_PLACEHOLDERS = "{user} and {index} (with zeros: {index:03d})"


def expand(pattern: str, count: int | None, user: str) -> list[str]:
    """Return the names of a template: ``count`` of them, or one without a count.

    Raises:
        InvalidRequest: an unknown placeholder, an ``{index}`` without a count or a count without ``{index}``, an
            invalid count, or an invalid resulting name.
    """
    fields = _fields(pattern)
    if count is not None and not 1 <= count <= INSTANCES_LIMIT:
        raise InvalidRequest(f"count={count} must be 1 to {INSTANCES_LIMIT}")
    if count is None and "index" in fields:
        raise InvalidRequest(f"name={pattern!r} has an {{index}}: say how many with count=")
    if count is not None and count > 1 and "index" not in fields:
        raise InvalidRequest(f"name={pattern!r} would be the name of all {count}: write {pattern + '/{index}'!r}")
    user_part = _name_part(user)
    return [check_name(pattern.format(user=user_part, index=index), "a job") for index in range(count or 1)]


def common_part(pattern: str, user: str) -> str:
    """Return the part before the index, as the name of the whole launch: ``alice/rl/rollout``."""
    return pattern.partition("{index")[0].format(user=_name_part(user)).rstrip("/-_.") or "jobs"


def _fields(pattern: str) -> list[str]:
    try:
        parts = [part for part in Formatter().parse(pattern) if part[1] is not None]
    except ValueError as error:
        raise InvalidRequest(f"name={pattern!r} cannot be read ({error}): it may have {_PLACEHOLDERS}") from None
    for _, field, spec, conversion in parts:
        if field not in ("user", "index") or conversion or (spec and (field == "user" or not _INDEX.match(spec))):
            shown = "{" + str(field) + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "") + "}"
            raise InvalidRequest(f"name={pattern!r} has {shown}: only {_PLACEHOLDERS} are allowed in braces")
    return [str(field) for _, field, _, _ in parts]


def _name_part(user: str) -> str:
    """Return a user's name as a valid part of names."""
    return re.sub(r"[^A-Za-z0-9_.@+=-]+", "-", user).strip("-.@+=") or "user"
