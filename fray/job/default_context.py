"""Which context the running code has."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

default_context: ContextVar[Any] = ContextVar("fray_job_context", default=None)
"""What `set_default_job_ctx` has set."""
