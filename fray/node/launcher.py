"""Interface between a node and what runs its attempts: processes, tasks of one loop, or a simulation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import trio

from fray.errors import ChannelClosed, Refused
from fray.model.log_records import LogChunk
from fray.model.messages.tunnels import RunCommand
from fray.model.monitoring.progress_protocol import AttemptReport
from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome
from fray.net.part_transfers import RequestController
from fray.net.transport import Bytes
from fray.net.tunnels.byte_stream import HalfCloseableStream
from fray.node.logs.store import AttemptLogs

OnObserved: TypeAlias = Callable[[ObservedAttempt, bytes | None], None]
"""Callback for every change of phase; the bytes are the outcome's value and come with the phase ENDED only."""
OnLog: TypeAlias = Callable[[str, LogChunk], None]
"""Callback for new log lines: attempt id, then records in the order of their numbers."""

OnReport: TypeAlias = Callable[[str, AttemptReport], None]
"""Callback for progress, health and usage reports of an attempt."""

CheckPath: TypeAlias = Callable[[str, int, str], Awaitable[None]]
"""Sends a GET for a path to a port of an attempt; raises `fray.node.health.http_check.BadAnswer`."""

SUSPENDED_BEFORE_START = Outcome(
    cause=EndReason.MACHINE_LOST, message="its machine was suspended for minutes before it started"
)


async def _not_a_member(message: object, blobs: Sequence[Bytes] = (), /) -> Any:
    raise ChannelClosed("this node is not a member of a cluster", reason="closed")


class Launcher(ABC):
    """Starts, stops and observes attempts.

    Only `run`, `capture`, `start_command` and `details` may wait; all that happens is reported through the callbacks.

    Invariants: an attempt is reported as any number of STARTING, RUNNING, STOPPING and then exactly once as ENDED with
    an outcome, after its last log line was reported and once none of its processes is alive.

    Attributes:
        logs: the logs of its attempts.
        on_observed: set by the node before `run`.
        on_log: set by the node before `run`.
        on_report: set by the node before `run`.
        on_busy: set by the node before `run`; called whenever `busy` changes.
        in_doubt: set by the node before `run`. Returns whether the machine was suspended for minutes and has not
            reached the controller since: its attempts may run elsewhere by now, so what would start now ends with
            `SUSPENDED_BEFORE_START` instead.
        request: set by the node before `run`. Fails while the node is not a member of the cluster.
        check_path: sends health checks where attempts have no real ports; None: over HTTP.
    """

    logs: AttemptLogs

    def __init__(self) -> None:
        self.on_observed: OnObserved = lambda observed, value: None
        self.on_log: OnLog = lambda attempt_id, chunk: None
        self.on_report: OnReport = lambda attempt_id, report: None
        self.on_busy: Callable[[], None] = lambda: None
        self.in_doubt: Callable[[], bool] = lambda: False
        self.request: RequestController = _not_a_member
        self.check_path: CheckPath | None = None

    @abstractmethod
    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own everything the attempts need; started when attempts may be started.

        When cancelled, every attempt ends, unreported.
        """

    @abstractmethod
    def start(self, attempt_spec: AttemptSpec, payload: bytes | None) -> None:
        """Start an attempt; one that cannot be started ends with `EndReason.ENVIRONMENT`.

        Args:
            payload: None for a program, and for an attempt whose spec names a large payload: the launcher fetches it.
        """

    @abstractmethod
    def stop(self, attempt_id: str, notice_s: float | None = None) -> None:
        """End an attempt by the termination policy of its spec.

        Its outcome has `EndReason.STOPPED` unless it succeeded before it noticed.

        Args:
            notice_s: it is preempted: notify it now, and start its termination so many seconds later. A program gets
                SIGTERM at once, and SIGKILL so much later than otherwise. None: it is stopped for another reason.
        """

    @abstractmethod
    def kill(self, attempt_id: str) -> None:
        """End an attempt at once."""

    @abstractmethod
    def forget(self, attempt_id: str) -> None:
        """Drop everything stored about an attempt, as soon as it has ended."""

    # Optional

    @property
    def busy(self) -> dict[str, str]:
        """Devices that cannot be allocated yet, each with the reason.

        A device that an attempt used is in here before the end of that attempt is reported.
        """
        return {}

    def attributes(self) -> dict[str, str]:
        """Return attributes for the node's `Capacity`; called once `run` has started."""
        return {}

    async def details(self) -> dict[str, str] | None:
        """Return a few short lines for people, by topic, as of now; None if there are never any."""
        return None

    async def capture(self, attempt_id: str) -> str:
        """Return the stacks of all threads of an attempt as text, or why there are none. The caller sets the limit."""
        return "[fray] this node cannot capture the stacks of its attempts"

    async def start_command(self, attempt_id: str, command: RunCommand) -> HalfCloseableStream:
        """Start a command in the environment of an attempt; return the stream of its frames.

        Raises:
            Refused: not possible here, or not now.
        """
        raise Refused("this node cannot run commands in the environment of its attempts")
