"""Light actors: many in one process, each with a life, a failure and restarts of its own.

The controller knows the process, which is an actor too: a `LightActorHost`. Its owner tells it, over the actor channel,
which light actors to make, and each new incarnation of it the whole set of those that shall live. Their numbers are the
owner's promise, so that handles stay good over restarts of the process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextvars import copy_context
from functools import partial
from itertools import takewhile
from typing import Any, TypeAlias

import trio
from attrs import evolve, frozen

from fray.errors import ActorDied, FrayError
from fray.model.ids import light_actor_id
from fray.model.messages.client import ActorEndpoint, Register, Unregister
from fray.model.restart_policy import RestartCounter
from fray.model.specs import ActorConfig
from fray.runtime import context
from fray.runtime.actors.hosted_actor import HostedActor
from fray.runtime.actors.lifecycle import (
    ActorLifecycle,
    ShutdownRequest,
    current_lifecycle,
    make_instance,
)
from fray.runtime.actors.methods import has_async_methods
from fray.runtime.actors.shutdown import end_when_idle, shut_down
from fray.runtime.calls.range_set import (
    ENDED_HERE,
    ENDS_KEPT,
    RAISED,
    Ranges,
    RangeSet,
)
from fray.runtime.serialization import errors, pickling
from fray.runtime.threads.executor import SerialExecutor

UNREGISTER_S = 1.0


@frozen(kw_only=True)
class LightActorBatch:
    """Light actors to be made of one class with the same arguments."""

    cls: bytes
    arguments: bytes
    """Pickle of ``(args, kwargs)``; each gets a copy of its own."""
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    indices: tuple[int, ...]
    config: ActorConfig
    group: str = ""
    registered: bool = False
    """Their names are bound in the namespace, each to one."""

    def select(self, places: Sequence[int]) -> LightActorBatch:
        """Those that stand at these places."""
        return evolve(
            self,
            numbers=tuple(self.numbers[place] for place in places),
            names=tuple(self.names[place] for place in places),
            indices=tuple(self.indices[place] for place in places),
        )


@frozen
class ActorEnded:
    """A light actor has ended for good. ``error``: `remote_errors.dump_error` of what it failed with, if it did."""

    number: int
    text: str
    error: bytes | None
    constructing: bool = False
    """It was its constructor that raised: this incarnation served no call."""


@frozen
class EndedBefore:
    """Light actors that ended for good before the reader came, and nobody knows why any more."""

    numbers: Ranges


Event: TypeAlias = int | ActorEnded | EndedBefore


class LightActorHost:
    """The actor in a process of light actors."""

    def __init__(self) -> None:
        me = current_lifecycle()
        assert me is not None
        self.runtime = context.current()
        self.host = self.runtime.host
        self.actor_id = me.actor_id
        self._tenants: dict[int, LightActor] = {}
        self._classes: dict[bytes, type] = {}
        self._log: dict[int, tuple[int, Event]] = {}
        """The last event of each number, and how many there were before it; in order."""
        self._count = 0
        self._ends = 0
        """Events of the log that are ends."""
        self._past = RangeSet()
        """Ends that are in the log no longer."""
        self._told: dict[object, int] = {}
        """For each reader: how many events there were when it was told last."""
        self._news = trio.Event()
        self._context = copy_context()

    # Called by the owner ---------------------------------------------------------------------------------------------

    async def create(self, batch: LightActorBatch) -> None:
        """Begin those that are not there yet. Returns when their names are theirs, not when they are made."""
        new = [self._promise(batch, place) for place in range(len(batch.numbers)) if self._is_new(batch.numbers[place])]
        if batch.registered:
            await self._register(new)
        for tenant in new:
            tenant.start()

    async def reconcile(self, batches: Sequence[LightActorBatch], over: Ranges) -> AsyncIterator[tuple[Event, ...]]:
        """Begin what shall live and is not there; then `events`. ``over``: those that have ended for good."""
        if over:
            self._past.update(over)
            self.host.pending.ended.update(over)
            self._happened(EndedBefore(over))
        for batch in batches:
            await self.create(batch)
        async for events in self.events():
            yield events

    async def events(self) -> AsyncIterator[tuple[Event, ...]]:
        """How it stands, then what happens: the number of one that is there now, an end for good, or many old ends.

        Of what happens to one actor before the reader comes to it, only the last is told.
        """
        reader = object()
        self._told[reader] = 0
        try:
            yield (EndedBefore(self._past.ranges),)
            while True:
                events = self._since(self._told[reader])
                self._told[reader] = self._count
                if events:
                    yield events
                else:
                    await self._news.wait()
        finally:
            del self._told[reader]

    def _since(self, told: int) -> tuple[Event, ...]:
        newest_first = takewhile(lambda entry: entry[0] >= told, reversed(self._log.values()))
        return tuple(event for _, event in newest_first)[::-1]

    async def end_calls(self, numbers: Sequence[int]) -> None:
        """End the calls of those that are ending and do not come to an end of them."""
        for number in numbers:
            if number in self._tenants:
                self._tenants[number].end_calls()

    async def count(self) -> int:
        """How many live."""
        return len(self._tenants)

    async def __fray_cleanup__(self) -> None:
        async with trio.open_nursery() as nursery:
            for tenant in self._tenants.values():
                nursery.start_soon(tenant.shut_down)

    # Tenants ---------------------------------------------------------------------------------------------------------

    def _is_new(self, number: int) -> bool:
        return number not in self._tenants and not self.host.pending.has_ended(number)

    def _promise(self, batch: LightActorBatch, place: int) -> LightActor:
        cls = self._classes.get(batch.cls)
        if cls is None:
            cls = self._classes[batch.cls] = pickling.loads(batch.cls)
        number = batch.numbers[place]
        tenant = self._tenants[number] = LightActor(self, cls, batch, place)
        self.host.pending.expected.add(number)
        return tenant

    async def _register(self, tenants: Sequence[LightActor]) -> None:
        try:
            for tenant in tenants:
                await self.runtime.link.request(Register(endpoint=tenant.endpoint(), exclusive=True))
        except FrayError:
            for tenant in tenants:
                del self._tenants[tenant.number]
                self.host.pending.expected.discard(tenant.number)
                await tenant.unregister()
            raise

    def spawn(self, task: Callable[[], Any]) -> None:
        """Run a task of this house's, in no call's context."""
        self._context.copy().run(self.host.spawn, task)

    def on_ended(self, tenant: LightActor, ending: ShutdownRequest) -> None:
        """A tenant has ended for good."""
        self._tenants.pop(tenant.number, None)
        error = None if ending.error is None else errors.dump_error(ending.error)
        self._happened(ActorEnded(tenant.number, ending.text, error, ending.constructing))

    def on_ready(self, tenant: LightActor) -> None:
        """A tenant is there (again)."""
        self._happened(tenant.number)

    def _happened(self, event: Event) -> None:
        number = event.number if isinstance(event, ActorEnded) else event if isinstance(event, int) else 0
        self._log.pop(number, None)
        self._log[number] = self._count, event
        self._count += 1
        self._ends += isinstance(event, ActorEnded)
        if self._ends > 2 * ENDS_KEPT and self._count % ENDS_KEPT == 0:
            self._forget()
        self._news.set()
        self._news = trio.Event()

    def _forget(self) -> None:
        """Old ends that all readers have heard of become mere numbers."""
        heard = min(self._told.values(), default=0)
        old = [number for number, (at, event) in self._log.items() if isinstance(event, ActorEnded) and at < heard]
        for number in old[: self._ends - ENDS_KEPT]:
            del self._log[number]
            self._past.add(number)
            self._ends -= 1


class LightActor:
    """One light actor in this process, through all its incarnations here."""

    __slots__ = (
        "_batch",
        "_began",
        "_cls",
        "_hosted",
        "_house",
        "_life",
        "_restarts",
        "_runner",
        "index",
        "name",
        "number",
    )

    def __init__(self, house: LightActorHost, cls: type, batch: LightActorBatch, place: int) -> None:
        self._house = house
        self._cls = cls
        self._batch = batch
        self.number = batch.numbers[place]
        self.name = batch.names[place]
        self.index = batch.indices[place]
        self._restarts: RestartCounter | None = None
        self._runner: SerialExecutor | None = None
        self._hosted: HostedActor | None = None
        self._life: ActorLifecycle | None = None
        self._began = 0.0

    @property
    def actor_id(self) -> str:
        return light_actor_id(self._house.actor_id, self.number)

    def endpoint(self) -> ActorEndpoint:
        runtime = self._house.runtime
        return ActorEndpoint(
            actor_id=self.actor_id,
            name=self.name,
            job_id=runtime.job_id or "",
            namespace=runtime.namespace,
            incarnation=runtime.session,
            number=self.number,
            addresses=tuple(runtime.host.addresses),
            key=runtime.host.key,
        )

    async def unregister(self) -> None:
        """Take its name back, if it has one."""
        if self._batch.registered:
            with trio.move_on_after(UNREGISTER_S):
                try:
                    await self._house.runtime.link.request(Unregister(actor_id=self.actor_id))
                except FrayError:
                    pass  # the conversation has ended, and the name with it

    # Birth -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the object: here, or on its lane if its class is all sync."""
        batch, house = self._batch, self._house
        self._began = trio.current_time()
        self._life = ActorLifecycle(
            self.actor_id,
            self.name,
            self._cls,
            incarnation=house.runtime.session,
            group=batch.group,
            index=self.index,
        )
        birth = _Construction(self, self._life, batch.arguments)
        if has_async_methods(self._cls):
            birth.run()
            birth.done()
            return
        if self._runner is None:
            self._runner = house.host.make_light_executor(self.name, batch.config.max_concurrency or 1)
        self._runner.submit(birth)
        self._runner.flush()

    def serve(self, instance: Any) -> None:
        """Serve it from now on."""
        host, config, life = self._house.host, self._batch.config, self._life
        assert life is not None
        host.register(
            instance,
            self.name,
            actor_id=self.actor_id,
            max_concurrency=config.max_concurrency,
            concurrency_groups=config.concurrency_groups,
            executor=self._runner,
            lifecycle=life,
            number=self.number,
        )
        self._hosted = host.actors[self.number]
        self._house.on_ready(self)
        life.set_on_ending(self._ends)
        if config.idle_s is not None and life.ending is None:
            self._house.spawn(partial(end_when_idle, self._hosted, life, config.idle_s))

    def on_constructor_failed(self, error: BaseException) -> None:
        """The constructor has raised."""
        wait_s = self._again_after_s(error)
        if wait_s is None:
            ending = ShutdownRequest(
                f"its constructor raised {type(error).__name__}: {error}", error, constructing=True
            )
            self._bury(ending)
            self._house.spawn(partial(self._leave, ending))
        else:
            self._house.spawn(partial(self._begin_after, wait_s))

    # End -------------------------------------------------------------------------------------------------------------

    def _ends(self) -> None:
        """It has asked for its end. From now on its calls wait for the next incarnation, or hear that there is none."""
        hosted, life = self._hosted, self._life
        assert hosted is not None
        assert life is not None
        assert life.ending is not None
        room = self._house.host.pending
        self._house.host.actors.pop(self.number, None)
        life.set_shutdown_event()
        wait_s = None if life.ending.error is None else self._again_after_s(life.ending.error)
        if wait_s is None:
            hosted.close(self._bury(life.ending))
        else:
            room.expected.add(self.number)
            for call in hosted.take_queued():
                call.actor = None
                room.hold(self.number, call.origin, call)
            hosted.close(life.ending.refusal_error(self.name))
        self._house.spawn(partial(self._end, hosted, life, life.ending, wait_s))

    def _bury(self, ending: ShutdownRequest) -> ActorDied:
        error = ActorDied(f"actor {self.name} is gone: {ending.text}", actor=self.name, **{ENDED_HERE: ending.text})
        if ending.error is not None:
            dumped = errors.dump_error(ending.error)
            error.__cause__ = errors.load_error(dumped)  # the error itself would hold on to its frames
            if ending.constructing:
                error.details[RAISED] = dumped
        self._house.host.pending.record_end(self.number, error)
        return error

    async def _end(
        self, hosted: HostedActor, life: ActorLifecycle, ending: ShutdownRequest, wait_s: float | None
    ) -> None:
        if ending.error is None:
            await hosted.wait_idle()
        with trio.CancelScope(shield=True):
            await shut_down(hosted, life, self._batch.config.cleanup_s)
        self._hosted = None
        if wait_s is None:
            await self._leave(ending)
        else:
            await self._begin_after(wait_s)

    async def _leave(self, ending: ShutdownRequest) -> None:
        if self._runner is not None:
            self._runner.stop()
        await self.unregister()
        self._house.on_ended(self, ending)

    async def _begin_after(self, wait_s: float) -> None:
        await trio.sleep(wait_s)
        self.start()

    def _again_after_s(self, error: BaseException) -> float | None:
        if self._restarts is None:
            self._restarts = RestartCounter(self._batch.config)
        now = trio.current_time()
        return self._restarts.on_failure(now, now - self._began)

    def end_calls(self) -> None:
        """It is ending: end its calls now."""
        if self._hosted is not None and self._life is not None and self._life.ending is not None:
            self._hosted.end_calls(None)

    async def shut_down(self) -> None:
        """Its process ends."""
        if self._hosted is not None and self._life is not None:
            await shut_down(self._hosted, self._life, self._batch.config.cleanup_s)


class _Construction:
    """The construction, as a job of the lane."""

    def __init__(self, tenant: LightActor, life: ActorLifecycle, arguments: bytes) -> None:
        self._tenant = tenant
        self._life = life
        self._arguments = arguments
        self._instance: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            args, kwargs = pickling.loads(self._arguments)
            self._instance = make_instance(self._life, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - it is the actor's end
            self._error = error

    def done(self) -> None:
        if self._error is not None:
            self._tenant.on_constructor_failed(self._error)
        else:
            self._tenant.serve(self._instance)
