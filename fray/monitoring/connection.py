"""Connection of a monitoring program to its controller, which it keeps until it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeAlias

import trio

from fray.api.cluster import Cluster
from fray.errors import FrayError
from fray.tracebacks import innermost

RECONNECT_S = 5.0
"""Default pause before a new session, if the controller has ended the last one or was away for too long."""

OpenCluster: TypeAlias = Callable[[], AbstractAsyncContextManager[Cluster]]

_log = logging.getLogger("fray.monitoring")


class ControllerConnection:
    """Connection to the controller.

    Args:
        open_cluster: connects.
        reconnect_s: pause before each further attempt, in seconds.
    """

    def __init__(self, open_cluster: OpenCluster, reconnect_s: float = RECONNECT_S) -> None:
        self._open = open_cluster
        self._reconnect_s = reconnect_s
        self.cluster: Cluster | None = None
        """The cluster; None while there is no session."""

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Stay connected until cancelled; reports ``started`` with the first connection.

        Raises:
            FrayError: the first connection fails. Later ones are tried again.
        """
        has_started = False
        while True:
            lost: BaseException | None = None
            try:
                async with self._open() as self.cluster:
                    if not has_started:
                        has_started = True
                        task_status.started()
                    await trio.sleep_forever()
            except* FrayError as group:
                lost = innermost(group)
            self.cluster = None
            if lost is not None and not has_started:
                raise lost
            _log.warning("no connection to the controller, retrying in %g s: %s", self._reconnect_s, lost)
            await trio.sleep(self._reconnect_s)
