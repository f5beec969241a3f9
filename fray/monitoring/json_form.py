"""Objects of the model as JSON: the one form of ``--json`` and of the dashboard."""

from __future__ import annotations

from enum import Enum
from typing import Any

import attrs


def plain(value: Any) -> Any:
    """Return the value as JSON types. Every field is there, also empty ones: programs can rely on the keys."""
    if attrs.has(type(value)):
        return {
            field.name: plain(getattr(value, field.name))
            for field in attrs.fields(type(value))
            if field.repr is not False
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    return value
