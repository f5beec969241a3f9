"""What the drivers of a story do, by name: a few operations on the public API each, with what must be true of them.

An act returns what came of it in a few words. Errors that a fault explains may end it; `fray.testing.sim` sorts them.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, Protocol

import trio
from attrs import Factory, define

from fray import (
    ActorHandle,
    ActorServer,
    Cause,
    Cluster,
    ClusterResolver,
    DeadlineExceeded,
    Entrypoint,
    Job,
    JobInfo,
    JobRequest,
    JobStopped,
    NameTaken,
    NeverSchedulable,
    NotPicklable,
    ResourceConfig,
    Scope,
    WorkerPool,
)
from fray.testing import errands
from fray.testing.errands import SMALL, Boom, Child, Counter, Tally, request

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
class Desk:
    """What a driver's life has gathered so far."""

    actors: list[KnownActor] = Factory(list)
    jobs: list[KnownJob] = Factory(list)


class Bench(Protocol):
    """One act at work."""

    cluster: Cluster
    desk: Desk
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


Act = Callable[[Bench], Awaitable[str]]


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


# Jobs ----------------------------------------------------------------------------------------------------------------


async def _launch(b: Bench, where: Scope | Cluster, wanted: JobRequest, **options: Any) -> Job:
    b.op("launch")
    job = await where.launch(wanted, **options)
    b.accepted(job)
    return job


async def _value_of(b: Bench, job: Job, value: int | None, token: str) -> str:
    b.op("wait")
    got = await job.wait()
    b.saw(job.info)
    b.check("P2", got == value, f"{token} returned {got}, not {value}")
    b.check("P4", b.runs(token) >= 1, f"{token} returned without having been executed")
    return f"value {got}"


async def value_job(b: Bench) -> str:
    """One job in a scope; its value comes back."""
    value = b.rng.randrange(1000)
    async with b.cluster.open_scope(b.token) as scope:
        wanted = request(b.token, errands.give, b.token, value, b.rng.uniform(0, 5))
        job = await _launch(b, scope, wanted)
        return await _value_of(b, job, value, b.token)


async def sync_job(b: Bench) -> str:
    """The same with sync code."""
    async with b.cluster.open_scope(b.token) as scope:
        job = await _launch(b, scope, request(b.token, errands.give_at_once, b.token, 5))
        return await _value_of(b, job, 5, b.token)


async def program(b: Bench) -> str:
    """A program with an exit code."""
    code = b.rng.choice((0, 0, 3))
    argv = Entrypoint.from_binary("sleeper", [f"{b.rng.uniform(0, 2):.3f}", str(code)])
    wanted = JobRequest(name=b.token, resources=SMALL, entrypoint=argv)
    job = await _launch(b, b.cluster, wanted)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    own = info.cause in (Cause.SUCCEEDED, Cause.FAILURE)
    b.check("P2", not own or info.exit_code == code, f"{b.token} ended with {info.exit_code}, not {code}")
    return f"{info.state} {info.exit_code}"


async def background_job(b: Bench) -> str:
    """A job of the connection, for others to wait for or terminate."""
    value, sleep_s = b.rng.randrange(1000), b.rng.uniform(0, 40)
    retries = b.rng.choice((0, 0, 2))
    if b.rng.random() < 0.25:
        job = await _launch(b, b.cluster, request(b.token, errands.fail, b.token, sleep_s))
        b.desk.jobs.append(KnownJob(job, None, b.token))
    else:
        wanted = request(b.token, errands.give, b.token, value, sleep_s, max_retries_failure=retries)
        job = await _launch(b, b.cluster, wanted)
        b.desk.jobs.append(KnownJob(job, value))
    return "accepted"


async def wait_for_job(b: Bench) -> str:
    """Wait for one of them."""
    if not b.desk.jobs:
        return await background_job(b)
    known = b.rng.choice(b.desk.jobs)
    b.op("wait")
    try:
        got = await known.job.wait()
    except Boom as boom:
        b.saw(known.job.info)
        b.check("P2", boom.token == known.boom, f"{known.job.name} raised the error of {boom.token}")
        return "its own error"
    except JobStopped:
        if not b.is_doomed(known.job.name):
            raise
        return "terminated meanwhile"
    b.saw(known.job.info)
    b.check("P2", not known.boom and got == known.value, f"{known.job.name} returned {got}, not {known.value}")
    return f"value {got}"


async def wait_for_many(b: Bench) -> str:
    """`Cluster.wait` for several at a time."""
    known = b.rng.sample(b.desk.jobs, min(len(b.desk.jobs), 4))
    b.op("wait")
    infos = await b.cluster.wait([each.job for each in known])
    for info in infos:
        b.saw(info)
        b.check("P3", info.state.finished, f"wait() returned {info.job_id} as {info.state}")
    return ", ".join(info.state for info in infos) or "nothing to wait for"


async def gang(b: Bench, resources: ResourceConfig = SMALL) -> str:
    """Several members, all or none; the value is the first one's."""
    members, fails = b.rng.randint(2, 4), b.rng.random() < 0.2
    fn: Any = errands.fail if fails else errands.give
    args = (b.rng.uniform(0, 3),) if fails else (9, b.rng.uniform(0, 3))
    wanted = request(b.token, fn, b.token, *args, resources=resources, replicas=members)
    try:
        async with b.cluster.open_scope(b.token) as scope:
            job = await _launch(b, scope, wanted)
            text = await _value_of(b, job, 9, b.token)
    except* Boom as group:
        b.check("P2", fails and booms(group) == {b.token}, f"{b.token} raised {booms(group)}")
        text = "its own error"
    b.check("P6", fails or b.runs(b.token) >= members, f"gang {b.token} of {members} succeeded with fewer members")
    b.doomed(b.token)
    return text


async def device_gang(b: Bench) -> str:
    """The same with accelerators; where there are too few it waits, or is refused."""
    resources = ResourceConfig.with_gpu("h100", count=b.rng.randint(1, 2), cpu=0.5, memory="100MB")
    text = "did not fit in time"
    try:
        with trio.move_on_after(30):
            text = await gang(b, resources)
    except* NeverSchedulable:
        text = "never schedulable"
    return text


async def detached_job(b: Bench) -> str:
    """A job that outlives its driver, and ends by itself."""
    wanted = request(b.token, errands.give, b.token, 1, b.rng.uniform(1, 20), detached=True)
    await _launch(b, b.cluster, wanted)
    return "accepted"


async def remote_run(b: Bench) -> str:
    """`Scope.run`: one remote call."""
    async with b.cluster.open_scope(b.token) as scope:
        b.op("run")
        got = await scope.run(errands.give, b.token, 4, b.rng.uniform(0, 2), resources=SMALL, name=b.token)
    b.check("P2", got == 4, f"{b.token} returned {got}")
    return f"value {got}"


# Scopes --------------------------------------------------------------------------------------------------------------


async def failing_scope(b: Bench) -> str:
    """One child fails: its error comes up with its type, its siblings are ended."""
    siblings = [f"{b.token}.{number}" for number in range(b.rng.randint(1, 3))]
    bad, text = f"{b.token}.bad", "no error"
    try:
        async with b.cluster.open_scope(b.token) as scope:
            b.op("open_scope")
            jobs = [await _launch(b, scope, request(name, errands.linger, name, 0.2)) for name in siblings]
            b.op("launch")
            jobs.append(await scope.launch(request(bad, errands.fail, bad, b.rng.uniform(0, 4))))
            b.accepted(jobs[-1])
        b.check("P2", False, f"scope {b.token} ended without the error of its child")
    except* Boom as group:
        b.check("P2", booms(group) == {bad}, f"scope {b.token} raised {booms(group)}")
        text = "the child's error"
    finally:
        b.doomed(bad, *siblings)
    return text


async def cancelled_scope(b: Bench) -> str:
    """A scope that is cancelled ends its children."""
    names = [f"{b.token}.{number}" for number in range(b.rng.randint(1, 3))]
    cleanup_s = b.rng.choice((0.0, 0.1, 1.0, 8.0))
    with trio.move_on_after(b.rng.uniform(0.01, 6)):
        async with b.cluster.open_scope(b.token) as scope:
            b.op("open_scope")
            for name in names:
                await _launch(b, scope, request(name, errands.linger, name, cleanup_s))
            if b.rng.random() < 0.5:
                names.append(f"{b.token}.actor")
                b.op("create_actor")
                await scope.create_actor(Counter, name=names[-1])
            await trio.sleep_forever()
    b.doomed(*names)
    return f"{len(names)} children ended"


async def error_in_body(b: Bench) -> str:
    """An error of the body ends the children and comes out beside nothing else."""
    name = f"{b.token}.child"
    try:
        async with b.cluster.open_scope(b.token) as scope:
            await _launch(b, scope, request(name, errands.linger, name, 0.1))
            await trio.sleep(b.rng.uniform(0, 2))
            raise Boom(b.token)
    except* Boom as group:
        b.check("P2", booms(group) == {b.token}, f"scope {b.token} raised {booms(group)}")
    b.doomed(name)
    return "the body's error"


def _draw_child(rng: random.Random, token: str, depth: int) -> Child:
    count = rng.randint(1, 2) if depth else 0
    children = tuple(_draw_child(rng, f"{token}.{number}", depth - rng.randint(1, depth)) for number in range(count))
    return Child(token, rng.randrange(100), rng.uniform(0, 4), rng.random() < 0.1, children)


async def family(b: Bench) -> str:
    """A job whose children have children."""
    top = _draw_child(b.rng, b.token, 2)
    text = ""
    try:
        async with b.cluster.open_scope(b.token) as scope:
            job = await _launch(b, scope, request(b.token, errands.family, top))
            text = await _value_of(b, job, top.total(), b.token)
        b.check("P2", not list(top.booms()), f"{b.token} succeeded although {list(top.booms())} failed")
    except* Boom as group:
        wrong = booms(group) - set(top.booms())
        b.check("P2", not wrong, f"{b.token} raised {wrong}, which did not fail")
        text = f"errors of {len(booms(group))} descendants"
    finally:
        b.doomed(*top.tokens())
    return text


async def abandoned_launch(b: Bench) -> str:
    """A launch that is cancelled half-way leaves nothing."""
    with trio.move_on_after(b.rng.choice((0.0005, 0.002, 0.01, 0.05))):
        async with b.cluster.open_scope(b.token) as scope:
            b.op("launch")
            await scope.launch(request(b.token, errands.linger, b.token, 0.0))
            await trio.sleep_forever()
    b.doomed(b.token)
    return "abandoned"


async def stopped_at_once(b: Bench) -> str:
    """Terminated right after the launch."""
    job = await _launch(b, b.cluster, request(b.token, errands.linger, b.token, 0.0))
    await trio.sleep(b.rng.choice((0, 0.001, 0.02, 0.1)))
    b.op("terminate")
    await job.terminate()
    b.doomed(b.token)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    allowed = (Cause.STOPPED, Cause.OWNER_ENDED, Cause.MACHINE_LOST, Cause.KILLED, Cause.PREEMPTED)
    b.check("P2", info.cause in allowed, f"{b.token} was stopped and ended as {info.cause}")
    return str(info.cause)


async def terminate(b: Bench) -> str:
    """`Cluster.terminate` of a job or an actor of the connection."""
    if not b.desk.jobs:
        return await stopped_at_once(b)
    known = b.desk.jobs.pop(b.rng.randrange(len(b.desk.jobs)))
    b.op("terminate")
    b.doomed(known.job.name)
    await b.cluster.terminate(known.job)
    b.op("wait")
    info = await b.cluster.wait(known.job)
    b.saw(info)
    return str(info.cause)


# Actors --------------------------------------------------------------------------------------------------------------


async def make_actor(b: Bench) -> str:
    """An actor of the connection, for others to call."""
    cls = b.rng.choice((Counter, Counter, Counter, Tally))
    restarts = b.rng.choice((0, 0, 3))
    b.op("create_actor")
    handle = await b.cluster.create_actor(cls, name=b.token, max_restarts=restarts)
    known = KnownActor(handle, cls is Counter, restarts)
    b.desk.actors.append(known)
    return await _add(b, known, f"{b.token}.first")


def _pick(b: Bench, has_async: bool = False) -> KnownActor | None:
    """One of the newest actors."""
    fitting = [known for known in b.desk.actors[-6:] if known.has_async or not has_async]
    return b.rng.choice(fitting) if fitting else None


async def _add(b: Bench, known: KnownActor, token: str, **options: Any) -> str:
    b.op("call")
    method = known.handle.add.options(**options) if options else known.handle.add
    got = await method(token)
    b.check("P4", b.runs(token) >= 1, f"{token} was answered without having been executed")
    b.check("P4", options != {} or b.runs(token) == 1, f"{token} was executed {b.runs(token)} times")
    return f"counted {got}"


async def calls(b: Bench) -> str:
    """Calls one after another count up."""
    known = _pick(b)
    if known is None:
        return await make_actor(b)
    texts = [await _add(b, known, f"{b.token}.{number}") for number in range(b.rng.randint(1, 4))]
    return texts[-1]


async def pipelined_calls(b: Bench) -> str:
    """Calls at once are executed in the order they were made."""
    known = _pick(b)
    if known is None:
        return await make_actor(b)
    futures = []
    for number in range(b.rng.randint(2, 8)):
        b.op("call")
        futures.append(known.handle.add.start(f"{b.token}.{number}"))
    results = [await future for future in futures]
    b.check("P4", results == sorted(set(results)), f"{b.token}: pipelined calls counted {results}")
    return f"counted {results}"


async def cancelled_call(b: Bench) -> str:
    """A cancelled await cancels the method."""
    known = _pick(b, has_async=True)
    if known is None:
        return await make_actor(b)
    with trio.move_on_after(b.rng.choice((0.0, 0.001, 0.01, 0.5, 2.0))):
        b.op("call")
        await known.handle.slow_add(b.token, 60.0)
    b.over_soon(b.token)
    return "cancelled"


async def call_with_deadline(b: Bench) -> str:
    """A deadline ends the call, whatever the callee does."""
    known = _pick(b, has_async=True)
    if known is None:
        return await make_actor(b)
    timeout_s, began = b.rng.choice((0.001, 0.1, 1.0, 5.0)), trio.current_time()
    b.op("call")
    try:
        await known.handle.slow_add.options(timeout_s=timeout_s)(b.token, 60.0)
    except DeadlineExceeded:
        late_s = trio.current_time() - began - timeout_s
        b.check("P3", late_s <= DEADLINE_SLACK_S, f"{b.token} ended {late_s:.1f} s after its deadline")
        b.over_soon(b.token)
        return "deadline"
    b.check("P3", False, f"{b.token} came back before its work was done")
    return "came back"


async def relayed_call(b: Bench) -> str:
    """Actors that call actors."""
    chain = [known.handle for known in b.desk.actors[-6:] if known.has_async]
    b.rng.shuffle(chain)
    if not chain:
        return await make_actor(b)
    b.op("call")
    cancelled = b.rng.random() < 0.3
    with trio.move_on_after(b.rng.uniform(0, 3) if cancelled else float("inf")):
        got = await chain[0].relay(b.token, chain[1:], 30.0 if cancelled else b.rng.uniform(0, 2))
        b.check("P4", got == len(chain), f"{b.token} passed {got} of {len(chain)} actors")
        return f"{got} actors"
    for depth in range(len(chain)):
        b.over_soon(b.token + "+" * depth)
    return "cancelled"


async def failing_call(b: Bench) -> str:
    """A method's error keeps its type, and the actor goes on."""
    known = _pick(b)
    if known is None:
        return await make_actor(b)
    b.op("call")
    try:
        await known.handle.boom(b.token)
    except Boom as boom:
        b.check("P2", boom.token == b.token, f"{b.token} raised the error of {boom.token}")
        return "its own error"
    b.check("P2", False, f"{b.token} did not raise")
    return "no error"


async def repeatable_call(b: Bench) -> str:
    """A call that may be repeated is answered as long as there is an incarnation."""
    known = _pick(b)
    if known is None:
        return await make_actor(b)
    return await _add(b, known, b.token, idempotent=True)


async def scoped_actor(b: Bench) -> str:
    """An actor ends with its scope, after the jobs."""
    name = f"{b.token}.actor"
    async with b.cluster.open_scope(b.token) as scope:
        b.op("create_actor")
        handle = await scope.create_actor(Counter, name=name)
        text = await _add(b, KnownActor(handle, True, 0), f"{b.token}.call")
    b.doomed(name)
    return text


async def names(b: Bench) -> str:
    """Register, look up, call, broadcast, unregister."""
    async with ActorServer(b.cluster) as server:
        b.op("register")
        await server.register(f"{b.token}.svc", Counter())
        await server.register(f"{b.token}.svc", Tally())
        pool = ClusterResolver(b.cluster).lookup(f"{b.token}.svc")
        b.op("lookup")
        await pool.wait_for_size(2, timeout=150)
        b.op("call")
        got = await pool.call().add(f"{b.token}.one")
        for number, future in enumerate(pool.broadcast().look()):
            b.op("call")
            await future
            b.check("P4", number < 2, f"{b.token}: broadcast reached more than it should")
        pool.close()
    return f"counted {got}"


async def worker_pool(b: Bench) -> str:
    """Tasks on whichever worker is free; each comes to its value."""
    async with WorkerPool(b.cluster, 2, resources=SMALL, name_prefix=b.token) as pool:
        b.op("pool")
        futures = []
        for number in range(5):
            b.op("submit")
            futures.append(pool.submit(errands.give, f"{b.token}.{number}", number, b.rng.uniform(0, 1)))
        got = [await future for future in futures]
    b.check("P2", got == list(range(5)), f"{b.token}: tasks returned {got}")
    return f"values {got}"


# Looking and asking wrongly ------------------------------------------------------------------------------------------


async def look_around(b: Bench) -> str:
    """Whatever can be asked."""
    b.op("list")
    listed = await b.cluster.list_jobs()
    b.op("nodes")
    nodes = await b.cluster.nodes()
    if listed:
        job_id = b.rng.choice(listed).job_id
        b.op("explain")
        text = await b.cluster.explain(job_id)
        b.check("P2", bool(text), f"nothing explains {job_id}")
        b.op("story")
        await b.cluster.story(job_id)
        b.op("poll")
        await b.cluster.poll(job_id)
    return f"{len(listed)} jobs, {len(nodes)} nodes"


async def bad_requests(b: Bench) -> str:
    """What cannot be is refused, and nothing comes of it."""
    b.op("launch")
    try:
        await b.cluster.launch(request(b.token, errands.give, (number for number in [1])))
        b.check("P2", False, "a generator was accepted as an argument")
    except NotPicklable:
        pass
    async with b.cluster.open_scope(b.token) as scope:
        b.op("create_actor")
        await scope.create_actor(Counter, name=b.token)
        b.op("create_actor")
        try:
            await scope.create_actor(Counter, name=b.token)
            b.check("P2", False, f"the name {b.token} was given twice")
        except NameTaken:
            pass
    return "refused"


ACTS: Mapping[str, Act] = {
    "value job": value_job,
    "sync job": sync_job,
    "program": program,
    "background job": background_job,
    "wait for a job": wait_for_job,
    "wait for many": wait_for_many,
    "failing scope": failing_scope,
    "family": family,
    "gang": gang,
    "device gang": device_gang,
    "cancelled scope": cancelled_scope,
    "error in the body": error_in_body,
    "make an actor": make_actor,
    "calls": calls,
    "pipelined calls": pipelined_calls,
    "cancelled call": cancelled_call,
    "call with deadline": call_with_deadline,
    "relayed call": relayed_call,
    "failing call": failing_call,
    "repeatable call": repeatable_call,
    "scoped actor": scoped_actor,
    "terminate": terminate,
    "names": names,
    "look around": look_around,
    "detached job": detached_job,
    "stopped at once": stopped_at_once,
    "abandoned launch": abandoned_launch,
    "worker pool": worker_pool,
    "bad requests": bad_requests,
    "remote run": remote_run,
}
