"""Parser of policy files: from their tables to a `Policy`.

Errors name the table and the key, and say what to write instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, TypeGuard

from fray.errors import InvalidRequest
from fray.model.policy.machine_groups import GroupConfig, read_group
from fray.model.policy.policy import (
    DEFAULT_TENANT,
    Amounts,
    Policy,
    Preemption,
    TenantPolicy,
)
from fray.model.policy.priority import Band
from fray.model.resources import parse_bytes, short_repr

Reader: TypeAlias = Callable[[str, Any], Any]
"""Parser of one value: takes its place in the file (for messages) and the value."""

KINDS = ("gpu", "tpu")
PRICED = ("cpu", "memory")
GROUPS_LIMIT = 1_000
NAMED_LIMIT = 10_000
"""Limit of users, and of namespaces, in one policy."""


def read_policy(tables: Mapping[str, Any]) -> Policy:
    """Return the policy of a file's tables.

    Raises:
        InvalidRequest: an unknown table or key, or an invalid value; the message says where, and what to write.
    """
    found = {}
    for key, value in tables.items():
        name, read = _look_up(key, TABLES, "the policy")
        found[name] = read(key, value)
    return Policy(**found)


def _look_up(key: str, keys: Mapping[str, Any], where: str) -> Any:
    """Return the entry of a key.

    Raises:
        InvalidRequest: unknown key; the message lists similar ones, or all.
    """
    if key in keys:
        return keys[key]
    near = difflib.get_close_matches(key, keys, 2)
    hint = f"did you mean {' or '.join(near)}?" if near else f"expected one of {', '.join(keys)}"
    raise InvalidRequest(f"{where}: unknown key {short_repr(key)}; {hint}")


# Values --------------------------------------------------------------------------------------------------------------


LEAST, MOST = 1e-6, 1e15
"""Bounds of numbers in a policy, so that values derived from them stay finite and exact."""


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def positive(where: str, value: Any) -> float:
    """Return the number, which must be above 0."""
    if not _is_number(value) or not LEAST <= value <= MOST:
        raise InvalidRequest(f"{where}={short_repr(value)} must be a number, more than 0 ({LEAST:g} to {MOST:g})")
    return float(value)


def amount(where: str, value: Any) -> float:
    """Return the number, which must be 0 or more."""
    if not _is_number(value) or not 0 <= value <= MOST:
        raise InvalidRequest(f"{where}={short_repr(value)} must be a number, 0 or more (at most {MOST:g})")
    return float(value)


def count(where: str, value: Any) -> int:
    """Return the whole number, which must be 0 or more."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST:
        raise InvalidRequest(f"{where}={short_repr(value)} must be a whole number, 0 or more (at most {MOST:g})")
    return value


def table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InvalidRequest(f"{where}={short_repr(value)} must be a table: write [{where}] and its keys below")
    return value


def _bands(where: str, value: Any) -> tuple[Band, ...]:
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not words:
        raise InvalidRequest(f'{where}={short_repr(value)} must be a list of bands: write ["interactive", "batch"]')
    return tuple(_band(where, word) for word in words)


def _band(where: str, word: Any) -> Band:
    names = [band.value for band in Band]
    if word in names:
        return Band(word)
    near = difflib.get_close_matches(str(word), names, 1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    words = ", ".join(map(repr, names))
    raise InvalidRequest(f"{where}: invalid priority band {short_repr(word)}; expected one of {words}{hint}")


def amounts(where: str, value: Any) -> Amounts:
    """Return the amounts of ``{ cpu = 64, memory = "1TB", gpu = 8, "gpu:h100" = 4 }``."""
    if not isinstance(value, dict) or not value:
        raise InvalidRequest(
            f'{where}={short_repr(value)} must be amounts: write {{ cpu = 64, memory = "1TB", gpu = 8 }}'
        )
    found: dict[str, Any] = {}
    devices: dict[str, int] = {}
    for key, amount in value.items():
        kind, colon, variant = key.lower().partition(":")
        if kind in KINDS and (variant or not colon):
            devices[kind + colon + variant] = count(f"{where}.{key}", amount)
        else:
            name, read = _look_up(key, AMOUNTS, where)
            found[name] = read(f"{where}.{key}", amount)
    return Amounts(devices=devices, **found)


def _cpus(where: str, value: Any) -> int:
    if not _is_number(value) or not 0 <= value <= MOST / 1000:
        raise InvalidRequest(
            f"{where}={short_repr(value)} must be a number of CPUs, 0 or more (at most {MOST / 1000:g})"
        )
    return round(value * 1000)


def _memory(where: str, value: Any) -> int:
    return parse_bytes(value, where)


def _borrow(where: str, value: Any) -> bool | Amounts:
    if isinstance(value, bool):
        return value
    if isinstance(value, dict) and value:
        return amounts(where, value)
    raise InvalidRequest(f"{where}={short_repr(value)} must be true, false, or amounts: {{ gpu = 4 }}")


# Tables --------------------------------------------------------------------------------------------------------------


def _launches_for(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value or not all(isinstance(name, str) and name for name in value):
        raise InvalidRequest(f'{where}={short_repr(value)} must be a list of users: write ["ada", "bob"], or ["*"]')
    return tuple(value)


def _tenants(keys: Mapping[str, tuple[str, Reader]]) -> Reader:
    """Return the reader of ``[users.NAME]`` or ``[namespaces.NAME]``; missing keys are those of ``"*"``, else the
    defaults."""

    def read(where: str, value: Any) -> dict[str, TenantPolicy]:
        found: dict[str, dict[str, Any]] = {}
        if len(table(where, value)) > NAMED_LIMIT:
            raise InvalidRequest(f"[{where}]: {len(value)} names, at most {NAMED_LIMIT}")
        for name, its in value.items():
            place = f"[{where}.{name if name.isidentifier() else repr(name)}]"
            if not isinstance(its, dict):
                raise InvalidRequest(
                    f"[{where}]: {name}={short_repr(its)} must be a table: write [{where}.NAME] and its keys below"
                )
            if not name.isprintable():
                raise InvalidRequest(f"[{where}]: {short_repr(name)} has a character that cannot be printed")
            found[name] = {}
            for key, amount in its.items():
                field, reader = _look_up(key, keys, place)
                if field == "launches_for" and name == DEFAULT_TENANT:
                    # All users would have each other's quotas, and namespaces.
                    raise InvalidRequest(f"{place}: launches_for is granted to one user: write it below [{where}.NAME]")
                found[name][field] = reader(f"{place} {key}", amount)
        common = found.get(DEFAULT_TENANT, {})
        return {name: TenantPolicy(**(common | its)) for name, its in found.items()}

    return read


def _groups(where: str, value: Any) -> tuple[GroupConfig, ...]:
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise InvalidRequest(
            f"{where}={short_repr(value)} must be tables: write [[group]] above the keys of each group"
        )
    groups = tuple(map(read_group, value))
    if len(groups) > GROUPS_LIMIT:
        raise InvalidRequest(f"{where}: {len(groups)} groups, at most {GROUPS_LIMIT}")
    names = [group.name for group in groups]
    for name in names:
        if names.count(name) > 1:
            raise InvalidRequest(f"[[group]] {name!r}: two groups have this name; give each its own")
    return groups


def _preemption(where: str, value: Any) -> Preemption:
    found = {}
    for key, amount in table(where, value).items():
        read = _look_up(key, PREEMPTION, f"[{where}]")
        found[key] = read(f"[{where}] {key}", amount)
    return Preemption(**found)


def _prices(where: str, value: Any) -> dict[str, float]:
    """Return the prices of ``{ cpu = 0.03, memory = 0.004, "gpu:h100" = 3.5 }``, by their keys in lower case."""
    found = {}
    for key, price in table(where, value).items():
        kind, colon, variant = key.lower().partition(":")
        if not (kind in KINDS and (variant or not colon)):
            _look_up(key, dict.fromkeys((*PRICED, *KINDS)), f"[{where}]")
        found[key.lower()] = amount(f"[{where}] {key}", price)
    return found


def flag(where: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidRequest(f"{where}={short_repr(value)} must be true or false")
    return value


def seconds(where: str, value: Any) -> float:
    """Return the number of seconds, which must be 0 or more."""
    if not _is_number(value) or not 0 <= value <= MOST:
        raise InvalidRequest(f"{where}={short_repr(value)} must be a number of seconds, 0 or more (at most {MOST:g})")
    return float(value)


PREEMPTION: Mapping[str, Reader] = {
    "enabled": flag,
    "bands": _bands,
    "reclaim": flag,
    "shield_s": seconds,
    "limit": count,
    "period_s": positive,
    "patience_s": seconds,
    "machine_wait_s": seconds,
    "notice_limit_s": seconds,
}
AMOUNTS: Mapping[str, tuple[str, Reader]] = {
    "cpu": ("cpu_milli", _cpus),
    "memory": ("memory_bytes", _memory),
    **dict.fromkeys(KINDS, ("devices", count)),
}
NAMESPACE: Mapping[str, tuple[str, Reader]] = {
    "weight": ("weight", positive),
    "quota": ("quota", amounts),
    "borrow": ("borrow", _borrow),
}
USER: Mapping[str, tuple[str, Reader]] = {
    **NAMESPACE,
    "bands": ("bands", _bands),
    "launches_for": ("launches_for", _launches_for),
}
TABLES: Mapping[str, tuple[str, Reader]] = {
    "half_life_s": ("half_life_s", positive),
    "users": ("users", _tenants(USER)),
    "namespaces": ("namespaces", _tenants(NAMESPACE)),
    "group": ("groups", _groups),
    "spend_limit_per_hour": ("spend_limit_per_hour", amount),
    "preemption": ("preemption", _preemption),
    "prices": ("prices", _prices),
}
"""Key of the file: field of `Policy`, and its reader."""
