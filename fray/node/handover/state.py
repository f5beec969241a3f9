"""State that a `fray-node` passes on to the program that replaces it: running attempts, and what holds them together.

Descriptors are numbers: the process stays the same, and they stay open. `FORMAT` is raised with every change that the
next or the previous release could not read; a node is replaced only by one that knows the same.
"""

from __future__ import annotations

from attrs import Factory, frozen

from fray.model.resources import PortRange
from fray.model.specs import AttemptSpec, Phase
from fray.node.prepare import LeaseHandover
from fray.node.resources.allocation import Allocation

FORMAT = 1


@frozen(kw_only=True)
class AttemptHandover:
    """Attempt with a shim."""

    attempt_spec: AttemptSpec
    directory: str
    phase: Phase
    pid: int | None
    shim: int
    """Pid of the shim."""
    shim_pidfd: int
    control: int
    unread: str = ""
    """Messages of the shim that were received and not handled."""
    pipes: dict[str, int] = Factory(dict)
    zygote: int
    """Pid of the zygote that has forked it."""
    allocation: Allocation
    holders_before: tuple[tuple[int, int], ...] = ()
    image: str = ""
    engine: str = ""
    log: tuple[int, int, int] | None = None
    """Place up to which its log was forwarded: number of the next line, segment, offset. None: it has no log."""
    stop_requested: bool = False
    kill_requested: bool = False
    overdue_at: float | None = None
    """Time of `time.monotonic` at which its shim is killed."""

    @property
    def directories(self) -> tuple[str, str, str]:
        """Directories of the attempt on the node."""
        return self.directory, self.attempt_spec.directory, self.attempt_spec.sockets


@frozen(kw_only=True)
class ZygoteHandover:
    """Zygote with living shims; its end would be theirs."""

    pid: int
    link: int


@frozen(kw_only=True)
class LauncherHandover:
    """State of a launcher."""

    attempts: tuple[AttemptHandover, ...] = ()
    zygotes: tuple[ZygoteHandover, ...] = ()
    leases: tuple[LeaseHandover, ...] = ()

    @property
    def descriptors(self) -> list[int]:
        """Return the descriptors that have to stay open."""
        own = [each for one in self.attempts for each in (one.shim_pidfd, one.control, *one.pipes.values())]
        return [*own, *(zygote.link for zygote in self.zygotes), *(lease.descriptor for lease in self.leases)]


@frozen(kw_only=True)
class NodeHandover:
    """State of a node that is a member of a cluster."""

    format: int = FORMAT
    incarnation: str
    heard_at: float
    """Time of `time.monotonic` at which the controller was heard last."""
    ports: PortRange
    failures: dict[str, str] = Factory(dict)
    """Attempts that are being stopped as failed, and why."""
    launcher: LauncherHandover
    connections: tuple[int, ...] = ()
    """Sockets that stay open, unread, until this node is a member again: their peers see silence and not an end."""
