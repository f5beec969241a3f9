"""The seam between a node and whatever runs its attempts: processes, tasks of one loop, or a fake."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

import trio

from fray.model.log_records import LogChunk
from fray.model.monitoring.progress_protocol import Said
from fray.model.specs import AttemptSpec, EndReason, ObservedAttempt, Outcome
from fray.net.transport import Bytes
from fray.node.logs.store import AttemptLogs

OnObserved: TypeAlias = Callable[[ObservedAttempt, bytes | None], None]
"""Told of every change of phase; the bytes are the outcome's value, with the phase ENDED."""
OnLog: TypeAlias = Callable[[str, LogChunk], None]
"""Told of lines as they come: attempt id, then records in the order of their numbers."""

Ask: TypeAlias = Callable[[object], Awaitable[tuple[Any, Sequence[Bytes]]]]
"""A request to the controller, and its answer with what is attached. Raises FrayError."""

OnSaid: TypeAlias = Callable[[str, Said], None]
"""Told of what an attempt says of itself."""


class Launcher(Protocol):
    """Starts, stops and watches attempts. Nothing but `run` blocks; what happens is told through ``on_observed``.

    Per attempt: any number of STARTING, RUNNING, STOPPING, then exactly one ENDED with an outcome, after its last log
    line was told and once nothing of it lives any more.
    """

    on_observed: OnObserved
    """Set by the node before `run`."""
    on_log: OnLog
    """Set by the node before `run`."""

    @property
    def logs(self) -> AttemptLogs:
        """What it keeps of what its attempts printed."""
        ...

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own whatever is needed; started when attempts may be started. Cancelled: every attempt ends, unreported."""
        ...

    def start(self, ticket: AttemptSpec, payload: bytes | None) -> None:
        """Start an attempt; one that cannot be started ends with `Cause.ENVIRONMENT`."""
        ...

    def stop(self, attempt_id: str, notice_s: float | None = None) -> None:
        """End it by the ladder of its spec. Its outcome has `Cause.STOPPED` unless it succeeded before it noticed.

        Args:
            notice_s: its place is taken: tell it so, and begin with the ladder so much later. A program gets SIGTERM at
                once, and SIGKILL so much later than else. None: it is ended for another reason.
        """
        ...

    def kill(self, attempt_id: str) -> None:
        """End it now."""
        ...

    def forget(self, attempt_id: str) -> None:
        """Drop all that is kept of it; waits until it has ended if it has not."""
        ...


@runtime_checkable
class Withholding(Protocol):
    """A launcher that looks whether devices are free before they are given again."""

    busy: dict[str, str]
    """Those that are not, and who holds them. One that an attempt had is in here before the attempt's end is told."""
    on_busy: Callable[[], None]
    """Set by the node before `Launcher.run`; told whenever that changes."""


@runtime_checkable
class Furnished(Protocol):
    """A launcher that knows more of its machine than its configuration does."""

    def attributes(self) -> dict[str, str]:
        """Attributes for the node's `Capacity`; asked once `Launcher.run` has started."""
        ...


@runtime_checkable
class Particular(Protocol):
    """A launcher that has more to tell of itself to people."""

    async def particulars(self) -> dict[str, str]:
        """A few short lines by what they are about, as they are now."""
        ...


@runtime_checkable
class Doubting(Protocol):
    """A launcher that begins nothing while its node does not know whether it still may."""

    in_doubt: Callable[[], bool]
    """Set by the node before `Launcher.run`: this machine was stopped for minutes and has not met the controller since.
    What would begin now ends as lost instead."""


STOPPED_MEANWHILE = Outcome(cause=EndReason.MACHINE_LOST, message="its machine was stopped for minutes before it began")


@runtime_checkable
class Asking(Protocol):
    """A launcher that needs more of the controller than tickets: workspaces."""

    ask: Ask
    """Set by the node before `Launcher.run`. Fails while the node is no member of the cluster."""
