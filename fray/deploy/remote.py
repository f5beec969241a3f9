"""Connection to a running controller (``fray://``)."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from fray.errors import InvalidRequest
from fray.model.ids import Namespace
from fray.model.log_records import LogLine
from fray.model.messages.client import Role
from fray.net.process_identity import process_mark
from fray.net.transport import Credential
from fray.net.transports.websocket import WebSocketNetwork
from fray.runtime.open import RuntimeConfig, open_runtime
from fray.runtime.runtime import Runtime

OWN_ADDRESS = "tcp:127.0.0.1:0"
"""Address on which a driver serves exported futures and pools; other machines reach it through the relay."""


@asynccontextmanager
async def open_remote(
    address: str,
    *,
    namespace: Namespace | None,
    token: str | None,
    on_log: Callable[[Sequence[LogLine]], None] | None,
    grace_s: float | None = None,
    role: Role = Role.DRIVER,
) -> AsyncIterator[Runtime]:
    """Connect to a running controller as a driver, or as a tool, which owns nothing.

    Raises:
        InvalidRequest: no token.
        Unreachable, Unauthorized, ProtocolMismatch.
    """
    secret = token if token is not None else os.environ.get("FRAY_TOKEN", "")
    if not secret:
        raise InvalidRequest(
            "authentication required: set FRAY_TOKEN, or pass open_cluster(token=...); "
            "fray-controller prints at its start where its token is"
        )
    async with open_runtime(
        WebSocketNetwork(),
        [address],
        # Tokens often come from files, with a newline at the end.
        Credential("cluster", secret.strip()),
        RuntimeConfig(
            role=role,
            namespace=namespace,
            grace_s=grace_s,
            process=process_mark(),  # a controller on this machine detects the end of this process without grace
            host_directory=lambda: OWN_ADDRESS,
        ),
        rng=random.SystemRandom(),
        on_log=on_log,
    ) as runtime:
        yield runtime
