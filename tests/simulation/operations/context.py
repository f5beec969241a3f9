"""Context of every act: its scenario, the objects of its driver, and steps that many acts share."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

from attrs import Factory, define

from fray import (
    ActorHandle,
    Cluster,
    Job,
    JobInfo,
    JobRequest,
    Scope,
)
from fray.model.ids import AttemptId, JobId
from tests.simulation.workloads import Boom, Counter, Tally

DEADLINE_SLACK_S = 6.0
"""Time after its deadline by which a call may end: a cancelled caller waits that long for an async method."""


@define
class KnownActor:
    """Actor that a driver has created."""

    handle: ActorHandle
    has_async: bool
    restarts: int
    last: dict[str, int] = Factory(dict)
    """Last count it answered, by incarnation."""


@define
class KnownJob:
    """Job launched and not waited for, with the result it must have."""

    job: Job
    value: int | None
    boom: str = ""


@define
class DriverState:
    """Objects of a driver."""

    actors: list[KnownActor] = Factory(list)
    jobs: list[KnownJob] = Factory(list)
    stateful_actors: list[Any] = Factory(list)
    """Actors of `tests.simulation.operations.supervision`."""


class OperationContext(Protocol):
    """Context of one act."""

    cluster: Cluster
    desk: DriverState
    rng: random.Random
    token: str
    """Unique prefix of the names and tokens of the act."""

    def op(self, what: str) -> None:
        """Count an operation."""

    def check(self, promise: str, holds: bool, text: str) -> None:
        """Record a breach unless the condition holds."""

    def accepted(self, job: Job) -> None:
        """Record that the controller has accepted the job: from now on it must end, whatever happens."""

    def saw(self, info: JobInfo) -> None:
        """Record an outcome, which must be final."""

    def doomed(self, *names: str) -> None:
        """Record that jobs of these names were ended: nothing of them may live much longer."""

    def is_doomed(self, name: str) -> bool:
        """Return whether an act has ended a job of this name."""

    def used(self, what: str) -> None:
        """Count something of `tests.simulation.coverage.USES`."""

    def over_soon(self, token: str) -> None:
        """Record that executions of this token were cancelled: none may last much longer."""

    def repeatable(self, token: str) -> None:
        """Record that the author allows executions of this token to be repeated, also by one incarnation."""

    def continued_at(self) -> float:
        """Return when the driver was continued after it had been stopped; 0.0 if it never was."""

    def runs(self, token: str) -> int:
        """Return how often it was executed, by the ground truth."""

    async def join(self, token: str, name: str) -> str:
        """Join as a machine with this join token, and return the id of its key. Raises as `find_credential`."""

    def printed(self, job_id: JobId) -> Mapping[AttemptId, int]:
        """Return how many lines its ended attempts have printed, by the ground truth."""


Act = Callable[[OperationContext], Awaitable[str]]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Return the errors in an exception group, or the one error."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def booms(error: BaseException) -> set[str]:
    """Return the tokens of the workloads' own errors in it."""
    return {leaf.token for leaf in leaves(error) if isinstance(leaf, Boom)}


# Steps that many acts share ------------------------------------------------------------------------------------------


async def launch(b: OperationContext, where: Scope | Cluster, wanted: JobRequest, **options: Any) -> Job:
    b.op("launch")
    job: Job = await where.launch(wanted, **options)
    b.accepted(job)
    return job


async def value_of(b: OperationContext, job: Job, value: int | None, token: str) -> str:
    b.op("wait")
    got = await job.wait()
    b.saw(job.info)
    b.check("P2", got == value, f"{token} returned {got}, not {value}")
    b.check("P4", b.runs(token) >= 1, f"{token} returned without having been executed")
    return f"value {got}"


async def make_actor(b: OperationContext) -> str:
    """Create an actor of the connection, for other acts to call."""
    cls = b.rng.choice((Counter, Counter, Counter, Tally))
    restarts = b.rng.choice((0, 0, 3))
    b.op("create_actor")
    handle = await b.cluster.create_actor(cls, name=b.token, max_restarts=restarts)
    known = KnownActor(handle, cls is Counter, restarts)
    b.desk.actors.append(known)
    return await add(b, known, f"{b.token}.first")


def pick(b: OperationContext, has_async: bool = False) -> KnownActor | None:
    """Return one of the newest actors."""
    fitting = [known for known in b.desk.actors[-6:] if known.has_async or not has_async]
    return b.rng.choice(fitting) if fitting else None


async def add(b: OperationContext, known: KnownActor, token: str, **options: Any) -> str:
    b.op("call")
    method = known.handle.add.options(**options) if options else known.handle.add
    got = await method(token)
    b.check("P4", b.runs(token) >= 1, f"{token} was answered without having been executed")
    b.check("P4", options != {} or b.runs(token) == 1, f"{token} was executed {b.runs(token)} times")
    return f"counted {got}"
