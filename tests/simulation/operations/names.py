"""Names: served, shared between drivers, deleted, looked at."""

from __future__ import annotations

from collections.abc import Mapping

import trio

from fray import (
    ActorConfig,
    ActorDied,
    ActorServer,
    ActorStatus,
    ClusterResolver,
    EndReason,
    MachineLost,
    NoSuchActor,
)
from fray.testing.fakes import KILLED_AT_START
from tests.simulation import workloads
from tests.simulation.operations.context import (
    Act,
    KnownActor,
    OperationContext,
    add,
    launch,
)
from tests.simulation.workloads import Counter, Tally, request


async def names(b: OperationContext) -> str:
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


async def deleted_actor(b: OperationContext) -> str:
    """An actor has ended when `delete_actor` returns, and its name can be used at once."""
    b.op("create_actor")
    first = await b.cluster.create_actor(Counter, name=b.token, max_restarts=3)
    await add(b, KnownActor(first, True, 3), f"{b.token}.first", idempotent=True)
    b.op("delete_actor")
    await b.cluster.delete_actor(b.rng.choice((first, b.token)))
    b.op("actor_status")
    status = await b.cluster.actor_status(first)
    b.check("P5", status in (ActorStatus.ENDED, ActorStatus.FAILED), f"{b.token} was deleted and is {status}")
    b.op("create_actor")
    second = await b.cluster.create_actor(Counter, name=b.token, max_restarts=3)
    b.op("call")
    count = await second.add.options(idempotent=True)(f"{b.token}.second")
    b.check("P5", count == 1, f"{b.token}: the second of the name counted {count}")
    b.op("get_actor")
    found = await b.cluster.get_actor(b.token)
    b.check("P5", found == second, f"{b.token} is {found}, not {second}")
    return "deleted and made again"


async def replaced_actor(b: OperationContext) -> str:
    """A name whose holder is being ended is waited for."""
    b.op("create_actor")
    first = await b.cluster.create_actor(Counter, name=b.token)
    async with trio.open_nursery() as nursery:
        b.op("delete_actor")
        nursery.start_soon(b.cluster.delete_actor, first)
        await trio.sleep(b.rng.choice((0.0, 0.002, 0.004, 0.006, 0.008)))
        b.op("create_actor")
        second = await b.cluster.create_actor(Counter, name=b.token, get_if_exists=True, max_restarts=3)
    b.op("call")
    try:
        await second.add.options(idempotent=True)(f"{b.token}.second")
    except MachineLost:
        raise  # where nothing is heard of a machine, its actors cannot be called, whichever of the two it was
    except ActorDied as error:
        if KILLED_AT_START.message in str(error):
            raise  # on a bad machine each of its lives is short
        b.check("P5", second == first, f"{b.token}: the second of the name died with the first")
        return "the first one, and it was ended"
    return "replaced"


async def shared_actor(b: OperationContext) -> str:
    """Drivers that do not share handles share actors by name, until these are idle or a driver deletes them."""
    name, config = f"shared{b.rng.randrange(3)}", ActorConfig(max_restarts=-1, idle_s=15.0)
    b.op("create_actor")
    handle = await b.cluster.create_actor(
        Counter, name=name, actor_config=config, lifetime="detached", get_if_exists=True
    )
    b.op("call")
    try:
        text = f"counted {await handle.add.options(idempotent=True)(b.token)}"
    except ActorDied:
        text = "it was just ended"
    if b.rng.random() < 0.3:
        b.op("delete_actor")
        try:
            await b.cluster.delete_actor(name)
        except NoSuchActor:
            text += ", and another driver has deleted it"
    return text


async def actor_of_job(b: OperationContext) -> str:
    """An actor that a job owns counts for all attempts of the job, and ends with it."""
    fails = b.rng.randint(0, 3)
    task = request(
        b.token,
        workloads.count_in_own_actor,
        b.token,
        fails,
        b.rng.uniform(0, 3),
        max_retries_failure=b.rng.choice((fails, fails, fails + 2, 1)),
    )
    job = await launch(b, b.cluster, task)
    if b.rng.random() < 0.3:
        await trio.sleep(b.rng.uniform(0, 6))
        b.op("terminate")
        await job.terminate()
        b.doomed(b.token)
    b.op("wait")
    info = await job.wait_ended()
    b.saw(info)
    b.doomed(f"{b.token}.own")
    if info.cause is not EndReason.SUCCEEDED:
        return f"{info.cause} after {info.retries}"
    actor, count = await job.wait()
    b.op("actor_status")
    restarts = (await b.cluster.actor_info(actor)).restarts
    counted = sum(b.runs(f"{b.token}.{number}") for number in range(1, b.runs(b.token) + 1))
    b.check("P1", restarts > 0 or count == counted, f"{b.token}: its actor counted {count} of {counted}")
    return f"counted {count} after {info.retries}, with {restarts} restarts"


async def actors_seen(b: OperationContext) -> str:
    """Lists and statuses agree with one another."""
    mine = [known.handle for known in b.desk.actors[-3:]]
    b.op("list_actors")
    listed = await b.cluster.list_actors()
    b.check("P5", all(info.ended is None for info in listed), f"{b.token}: ended actors are listed: {listed}")
    names = [info.name for info in listed if not info.served]
    for handle in mine:
        b.op("actor_status")
        info = await b.cluster.actor_info(handle)
        b.check("P5", info.ended is not None or info.name in names, f"{info} is not listed")
    return f"{len(listed)} actors"


ACTS: Mapping[str, Act] = {
    "names": names,
    "deleted actor": deleted_actor,
    "replaced actor": replaced_actor,
    "shared actor": shared_actor,
    "actor of a job": actor_of_job,
    "actors seen": actors_seen,
}
