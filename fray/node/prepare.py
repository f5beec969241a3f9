"""What an attempt needs before a shim is asked for it: packages, files, variables, an image.

One step, between the attempt_spec and the process. It may take minutes (packages are fetched) or nothing at all (the
node's
own environment: no checkpoint is made). What it says are lines of the attempt's log; a stop cancels it.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from attrs import Factory, asdict, field, frozen
from attrs import filters as attr_filters

from fray.model.specs import AttemptSpec, EndReason

if TYPE_CHECKING:  # shims read this file, and know no loop
    import trio

Say: TypeAlias = Callable[[str], None]
"""One line for the attempt's log."""


class NotPrepared(Exception):
    """The attempt cannot be started as asked: it ends with this message, and ``cause`` says whose doing it is."""

    def __init__(self, message: str, cause: EndReason = EndReason.ENVIRONMENT) -> None:
        super().__init__(message)
        self.cause = cause


@frozen(kw_only=True)
class PreparedEnvironment:
    """What the process of an attempt starts from, once all it needs is on this machine."""

    interpreter: str = ""
    """Python of its environment, whose zygote forks its shim. Empty: the node's own."""
    environ: dict[str, str] = field(factory=dict, repr=False)
    """What that zygote has as its variables."""
    lock_path: str = ""
    """Lock file of the environment, for the zygote to lock_path."""
    variables: dict[str, str] = Factory(dict)
    """Of its environment; the job's own variables go before them."""
    fixed_variables: dict[str, str] = field(factory=dict, repr=False)
    """Go before the job's own variables: ports, secrets. They are in no record and no log."""
    cwd: str | None = None
    """Where it works. Default: the author's directory if it exists here, else the attempt's own."""
    sys_path: tuple[str, ...] = ()
    """In front of everything else on ``sys.path``: what is to be imported from there even if it is installed, too."""
    image: str = ""
    """Of its container; empty: it has none."""
    engine: str = ""
    """The program that runs it."""
    label: str = ""
    """By which this node finds its containers."""
    library: dict[str, str] = Factory(dict)
    """What the container is given of Fray: name to path."""
    argv: tuple[str, ...] = ()
    """In front of the program and its arguments."""

    def for_shim(self) -> dict[str, Any]:
        """What its shim hears of it: what concerns the process, not its zygote."""
        return asdict(self, filter=attr_filters.exclude("environ", "lock_path"))


class Preparer(Protocol):
    """Makes ready what attempts need."""

    async def prepare(self, attempt_spec: AttemptSpec, say: Say) -> PreparedEnvironment:
        """Return once everything is here. Cancelled: what only this attempt waited for is given up.

        Raises:
            NotPrepared: it cannot be made ready.
        """
        ...


class EnvironmentServices(Protocol):
    """What is behind a preparer: processes that work for it, and what attempts lock_path until they end."""

    @property
    def pids(self) -> AbstractSet[int]:
        """Children of this process that it has started and will reap."""
        ...

    async def run(self, *, task_status: trio.TaskStatus[None]) -> None:
        """Own what works here. Cancelled: it ends."""
        ...

    async def clean_up(self, prepared: PreparedEnvironment, attempt_id: str) -> None:
        """The attempt's shim was killed: end what that had to end and is below nobody here."""
        ...

    async def describe(self) -> str:
        """What it has ready, for people; empty: nothing."""
        ...

    def release(self, attempt_id: str) -> None:
        """The attempt has ended, whether or not it was prepared: what it used may go."""
        ...


class RequirementProvider(Preparer, EnvironmentServices, Protocol):
    """Both."""


class NothingToPrepare:
    """For nodes whose jobs run in the node's own environment."""

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
