"""Interface of preparation: packages, files, variables and images that an attempt needs before its shim is started.

Preparation may take minutes (packages are downloaded) or nothing at all (the node's own environment: not even a
checkpoint). Its output goes to the attempt's log; a stop cancels it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from attrs import Factory, asdict, field, frozen
from attrs import filters as attr_filters

from fray.model.specs import AttemptSpec, EndReason

if TYPE_CHECKING:  # shims import this file, and never trio
    import trio

Say: TypeAlias = Callable[[str], None]
"""Writes one line to the attempt's log."""


class NotPrepared(Exception):
    """The attempt cannot be started as requested: it ends with this message and ``cause``."""

    def __init__(self, message: str, cause: EndReason = EndReason.ENVIRONMENT) -> None:
        super().__init__(message)
        self.cause = cause


@frozen(kw_only=True)
class PreparedEnvironment:
    """Everything that the process of an attempt starts from, once it is on this machine."""

    interpreter: str = ""
    """Python of its environment, whose zygote forks its shim. Empty: the node's own."""
    environ: dict[str, str] = field(factory=dict, repr=False)
    """Environment variables of that zygote."""
    lock_path: str = ""
    """Lock file of the environment, held by the zygote."""
    variables: dict[str, str] = Factory(dict)
    """Variables of its environment; the job's own variables override them."""
    # Left out of the repr, as `environ` is: both may have credentials, and a repr ends in tracebacks and logs.
    fixed_variables: dict[str, str] = field(factory=dict, repr=False)
    """Variables that override the job's own, such as ports and secrets. They are in no record and no log."""
    cwd: str | None = None
    """Working directory. Default: the author's directory if it exists here, else the attempt's own."""
    sys_path: tuple[str, ...] = ()
    """Entries in front of everything else on ``sys.path``, also of installed packages of the same names."""
    starts_cold: bool = False
    """True if ``interpreter`` is executed for the attempt alone, and no zygote runs it."""
    image: str = ""
    """Image of its container; empty: no container."""
    engine: str = ""
    """Program of the container engine."""
    label: str = ""
    """Label by which this node finds its containers."""
    library: dict[str, str] = Factory(dict)
    """Parts of Fray mounted into the container: name to path."""
    argv: tuple[str, ...] = ()
    """Words in front of the program and its arguments."""

    def for_shim(self) -> dict[str, Any]:
        """Return what the shim needs of it: everything but its zygote's part."""
        # Only the zygote needs these, and it has been started with them.
        return asdict(self, filter=attr_filters.exclude("environ", "lock_path"))


@frozen(kw_only=True)
class LeaseHandover:
    """Lock on an environment that is passed on to the next program in this process, and the attempts that use it."""

    path: str
    descriptor: int
    attempts: tuple[str, ...]


class Preparer(Protocol):
    """Prepares attempts."""

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        """Return once everything is here. When cancelled, give up what only this attempt waited for.

        Raises:
            NotPrepared: it cannot be prepared.
        """
        ...


class EnvironmentServices(Protocol):
    """Background work of a preparer: its processes, and what attempts hold until they end."""

    @property
    def pids(self) -> AbstractSet[int]:
        """Children of this process that it has started and will reap."""
        ...

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own the background work. When cancelled, end it."""
        ...

    async def clean_up(self, prepared: PreparedEnvironment, attempt_id: str) -> None:
        """End what the attempt's shim, which was killed, had to end and which is not below this process."""
        ...

    async def describe(self) -> str:
        """Return what is cached, for people; empty: nothing."""
        ...

    def release(self, attempt_id: str) -> None:
        """Release what an attempt used; it has ended, prepared or not."""
        ...

    def hand_over(self, attempts: Collection[str]) -> list[LeaseHandover]:
        """Return what these attempts use and what has to stay locked."""
        ...

    def adopt(self, leases: Iterable[LeaseHandover]) -> None:
        """Hold what running attempts use, before `run`; containers are not ended then."""
        ...


class RequirementProvider(Preparer, EnvironmentServices, Protocol):
    """Preparer with its background work."""


class NothingToPrepare:
    """Preparer of nodes whose jobs run in the node's own environment."""

    pids: AbstractSet[int] = frozenset()

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        task_status.started()

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        return PreparedEnvironment()

    async def clean_up(self, prepared: PreparedEnvironment, attempt_id: str) -> None:
        pass

    async def describe(self) -> str:
        return ""

    def release(self, attempt_id: str) -> None:
        pass

    def hand_over(self, attempts: Collection[str]) -> list[LeaseHandover]:
        return []

    def adopt(self, leases: Iterable[LeaseHandover]) -> None:
        pass
