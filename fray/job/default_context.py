"""Context of the running code, where the modules below the kinds of contexts look for it."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any, Protocol

from fray.model.service_key import ServiceKey

default_context: ContextVar[Any] = ContextVar("fray_job_context", default=None)
"""Context that `set_default_job_ctx` has set."""


class StoredContext(Protocol):
    """Service of a runtime under `JOB_CONTEXT`: a context, or a pickled one that was sent with a worker."""

    def opened(self) -> Any:
        """Return the context itself."""


JOB_CONTEXT: ServiceKey[StoredContext] = ServiceKey("job context")
"""Key of the context that belongs to the code of a runtime."""
opening = threading.RLock()
"""Held while the context of a runtime is opened or made, so that all its code gets the same one."""


def stored_context(services: Any) -> Any:
    """Return the context among the services of a runtime, opened if it came by pickle; None if there is none."""
    with opening:
        found = services.get(JOB_CONTEXT)
        if found is None:
            return None
        # Stored opened, so that all code of the worker shares one pool handle.
        context = services[JOB_CONTEXT] = found.opened()
        return context
