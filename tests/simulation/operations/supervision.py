"""Groups that restart together, back-off, and actors that store their state."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

import trio
from attrs import Factory, define

import fray
from fray import ActorConfig, ActorDied, ActorHandle, RemoteError, ResourceConfig
from fray.api.actors.handle import actor_id_of
from tests.simulation.operations.context import Act, OperationContext
from tests.simulation.workloads import Counter, Fragile, StatefulActor


@define
class KnownStatefulActor:
    """Actor that stores its state, and the state it has confirmed as stored."""

    handle: ActorHandle
    added: set[str] = Factory(set)
    kept: set[str] = Factory(set)
    quitting: int = 0
    """Calls under way that make it fail."""
    has_quit: int = 0
    """Such calls that have ended."""

    async def tokens(self, call: Awaitable[list[str]]) -> set[str] | None:
        """Return the tokens that a call returns; None if another act made the actor fail while the call was running:
        it then ends with the error of that act's call."""
        quits = self.has_quit
        try:
            return set(await call)
        except RemoteError as error:
            if "SystemExit" in str(error) and (self.quitting or self.has_quit > quits):
                return None
            raise

    async def quit(self, b: OperationContext) -> None:
        """Make it fail."""
        self.quitting += 1
        try:
            await _quit(b, self.handle)
        finally:
            self.quitting -= 1
            self.has_quit += 1


async def _quit(b: OperationContext, actor: ActorHandle) -> None:
    """Make it fail."""
    b.op("call")
    try:
        await actor.quit(f"{b.token}.quit")
    except RemoteError:
        return
    except ActorDied:
        return  # it was faster, or another driver
    b.check("P2", False, f"{b.token}: an actor continued after it had left")


async def supervised_group(b: OperationContext) -> str:
    """One of three fails, and restarts with those that its strategy names; `fray.testing.ground_truth` checks which."""
    strategy: Any = b.rng.choice(("one_for_one", "one_for_all", "rest_for_one"))
    names = [f"{b.token}.{number}" for number in range(3)]
    async with b.cluster.open_scope(b.token) as scope:
        b.op("supervise")
        members = await scope.supervise(
            [fray.child(Fragile, name=name) for name in names],
            strategy=strategy,
            max_restarts=50,
            period_s=b.rng.choice((None, 60.0)),
            backoff_s=b.rng.choice((0.0, 0.0, 0.5)),
        )
        for number in range(b.rng.randint(1, 2)):
            victim = b.rng.choice(members)
            b.op("call")
            await victim.add.options(idempotent=True)(f"{b.token}.{number}.before")
            await _quit(b, victim)
            b.op("call")
            count = await victim.add.options(idempotent=True)(f"{b.token}.{number}.after")
            b.check("P5", count == 1, f"{b.token}: a restarted member counted {count}")
        b.op("call")
        counts = [await one.add.options(idempotent=True)(f"{b.token}.last.{i}") for i, one in enumerate(members)]
    b.doomed(*names)
    return f"{strategy}, then counted {counts}"


async def exhausted_group(b: OperationContext) -> str:
    """A group fails more often than it may: all its members end, one as failed and the others with it."""
    names = [f"{b.token}.{number}" for number in range(3)]
    async with b.cluster.open_scope(b.token) as scope:
        b.op("supervise")
        children = [fray.child(Fragile, name=name) for name in names]
        members = await scope.supervise(children, max_restarts=1, period_s=None, on_failure="absorb")
        for number in range(2):
            b.op("call")
            try:
                await members[0].add.options(idempotent=True)(f"{b.token}.{number}")
            except ActorDied:
                break  # its machine is silent, or was lost
            await _quit(b, members[0])
        b.op("wait")
        with trio.move_on_after(60):
            for member in members:
                await b.cluster.wait(actor_id_of(member))
        infos = [await b.cluster.actor_info(member) for member in members]
        # How the others end is checked by the invariants of the scheduler (`groups`), and by P1 after this scope.
    b.doomed(*names)
    return ", ".join(info.status for info in infos)


async def crash_loop(b: OperationContext) -> str:
    """An actor that fails again and again waits longer each time, and then is not restarted any more."""
    restarts, backoff_s = b.rng.randint(1, 3), b.rng.choice((0.0, 0.2, 1.0))
    config = ActorConfig(max_restarts=restarts, restart_period_s=600.0, backoff_s=backoff_s)
    b.op("create_actor")
    actor = await b.cluster.create_actor(Fragile, name=b.token, actor_config=config)
    for number in range(restarts + 1):
        b.op("call")
        try:
            await actor.add.options(idempotent=True)(f"{b.token}.{number}")
        except ActorDied:
            break  # another driver has made it fail, too, or its machine is silent
        await _quit(b, actor)
    b.op("wait")
    with trio.move_on_after(60):
        await b.cluster.wait(actor_id_of(actor))
    info = await b.cluster.actor_info(actor)
    if info.ended is None:  # it was asked to fail more often than it did
        b.doomed(b.token)
        await b.cluster.delete_actor(actor)
        return f"ended while {info.status}: {info.reason}"[:60]
    b.check("P2", info.status is fray.ActorStatus.FAILED, f"{b.token} failed too often and is {info.status}")
    b.check("P2", "restarted" in info.reason, f"{b.token} does not say that it was restarted: {info.reason}")
    return info.reason[:60]


async def stateful_actor(b: OperationContext) -> str:
    """State that an actor has confirmed as stored is there in every later incarnation."""
    known = (
        b.rng.choice(b.desk.stateful_actors[-2:])
        if b.desk.stateful_actors and b.rng.random() < 0.6
        else await _make_stateful_actor(b)
    )
    for number in range(b.rng.randint(1, 3)):
        token = f"{b.token}.{number}"
        known.added.add(token)
        b.op("call")
        tokens = await known.tokens(known.handle.add(token))
        if tokens is not None:
            b.check("P7", known.kept <= tokens, f"{b.token}: {sorted(known.kept - tokens)} were kept and are gone")
            b.check("P5", tokens <= known.added, f"{b.token}: {sorted(tokens - known.added)} were never added")
        if b.rng.random() < 0.6:
            b.op("call")
            known.kept |= await known.tokens(known.handle.keep(f"{token}.keep")) or set()
        if b.rng.random() < 0.4:
            await known.quit(b)
    b.op("call")
    tokens = set(await known.handle.look.options(idempotent=True)())
    b.check("P7", known.kept <= tokens, f"{b.token}: {sorted(known.kept - tokens)} were kept and are gone")
    return f"{len(tokens)} tokens, {len(known.kept)} kept"


async def _make_stateful_actor(b: OperationContext) -> KnownStatefulActor:
    config = ActorConfig(
        max_restarts=-1,
        may_overlap=b.rng.random() < 0.3,
        checkpoint_every_s=b.rng.choice((None, 5.0)),
    )
    b.op("create_actor")
    known = KnownStatefulActor(await b.cluster.create_actor(StatefulActor, name=b.token, actor_config=config))
    b.desk.stateful_actors.append(known)
    return known


async def device_actor(b: OperationContext) -> str:
    """An actor with a device that may start again before its silent machine has given it up."""
    config = ActorConfig(max_restarts=-1, may_overlap=True)
    resources = ResourceConfig.with_gpu("h100", count=b.rng.randint(1, 2), cpu=0.5, memory="100MB")
    text = "did not fit in time"
    with trio.move_on_after(b.rng.uniform(60, 150)):
        async with b.cluster.open_scope(b.token) as scope:
            b.op("create_actor")
            actor = await scope.create_actor(Counter, name=b.token, actor_config=config, resources=resources)
            b.op("call")
            text = f"counted {await actor.add.options(idempotent=True)(b.token)}"
            await trio.sleep_forever()
    b.doomed(b.token)
    return text


ACTS: Mapping[str, Act] = {
    "supervised group": supervised_group,
    "exhausted group": exhausted_group,
    "crash loop": crash_loop,
    "stateful actor": stateful_actor,
    "device actor": device_actor,
}
