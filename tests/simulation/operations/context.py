"""What every act works with: its bench, what its driver has made so far, and the steps that many share."""

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
"""How much later than its deadline a call may end: a cancelled caller waits that long for an async method."""


@define
class KnownActor:
    """An actor a driver has made."""

    handle: ActorHandle
    has_async: bool
    restarts: int
    last: dict[str, int] = Factory(dict)
    """Per incarnation: the last count it answered."""


@define
class KnownJob:
    """A job launched and not waited for, with what it must come to."""

    job: Job
    value: int | None
    boom: str = ""


@define
class DriverState:
    """What a driver's life has gathered so far."""

    actors: list[KnownActor] = Factory(list)
    jobs: list[KnownJob] = Factory(list)
    keepers: list[Any] = Factory(list)
    """Of `tests.simulation.operations.supervision`."""


class OperationContext(Protocol):
    """One act at work."""

    cluster: Cluster
    desk: DriverState
    rng: random.Random
    token: str
    """Unique; names and tokens of the act begin with it."""

    def op(self, what: str) -> None:
        """Count an operation."""

    def check(self, promise: str, holds: bool, text: str) -> None:
        """Write a breach down unless it holds."""

    def accepted(self, job: Job) -> None:
        """The controller has taken the job: from now on it must come to its end, whatever happens."""

    def saw(self, info: JobInfo) -> None:
        """This outcome was seen: it is for good."""

    def doomed(self, *names: str) -> None:
        """Jobs of these names have been ended: nothing of them may live much longer."""

    def is_doomed(self, name: str) -> bool:
        """Whether some act has ended a job of this name."""

    def over_soon(self, token: str) -> None:
        """Executions of this token have been cancelled: none may last much longer."""

    def runs(self, token: str) -> int:
        """How often it was executed, by the book."""

    async def join(self, token: str, name: str) -> str:
        """Be a machine that shows this join token; the id of the key it is given. Raises as `find_credential`."""

    def printed(self, job_id: JobId) -> Mapping[AttemptId, int]:
        """How many lines its attempts that are over have printed, by the book."""


Act = Callable[[OperationContext], Awaitable[str]]


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors in an exception group, or the one error."""
    if isinstance(error, BaseExceptionGroup):
        for each in error.exceptions:
            yield from leaves(each)
    else:
        yield error


def booms(error: BaseException) -> set[str]:
    """Tokens of the errands' own errors in it."""
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
    """An actor of the connection, for others to call."""
    cls = b.rng.choice((Counter, Counter, Counter, Tally))
    restarts = b.rng.choice((0, 0, 3))
    b.op("create_actor")
    handle = await b.cluster.create_actor(cls, name=b.token, max_restarts=restarts)
    known = KnownActor(handle, cls is Counter, restarts)
    b.desk.actors.append(known)
    return await add(b, known, f"{b.token}.first")


def pick(b: OperationContext, has_async: bool = False) -> KnownActor | None:
    """One of the newest actors."""
    fitting = [known for known in b.desk.actors[-6:] if known.has_async or not has_async]
    return b.rng.choice(fitting) if fitting else None


async def add(b: OperationContext, known: KnownActor, token: str, **options: Any) -> str:
    b.op("call")
    method = known.handle.add.options(**options) if options else known.handle.add
    got = await method(token)
    b.check("P4", b.runs(token) >= 1, f"{token} was answered without having been executed")
    b.check("P4", options != {} or b.runs(token) == 1, f"{token} was executed {b.runs(token)} times")
    return f"counted {got}"
