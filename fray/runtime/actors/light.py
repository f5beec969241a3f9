"""Light actors: many in one process, each with its own lifecycle, failures and restarts.

The controller has no record of light actors, except names of their own: it has their process, which is an actor
itself, a `LightActorHost`. The owner of the host requests light actors over the actor channel, and gives each new
incarnation of the host the whole set of those that are to live. Their numbers are assigned by the owner and
are part of their ids (``{host}~{number}``), so a handle finds its actor by the directory entry of the host alone, over
restarts of the process too.
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
from fray.model.messages.client import ActorEndpoint
from fray.model.restart_policy import RestartCounter
from fray.model.specs import ActorConfig
from fray.runtime.actors.endpoints import make_endpoint, registrations_of
from fray.runtime.actors.lifecycle import (
    ActorLifecycle,
    ShutdownRequest,
    current_lifecycle,
    make_instance,
)
from fray.runtime.actors.methods import has_async_methods
from fray.runtime.actors.served_actor import ServedActor
from fray.runtime.actors.server import host_of
from fray.runtime.actors.shutdown import end_when_idle, shut_down
from fray.runtime.calls.range_set import (
    ENDED_HERE,
    ENDS_KEPT,
    RAISED,
    Ranges,
    RangeSet,
)
from fray.runtime.runtime import current
from fray.runtime.serialization import errors, pickling
from fray.runtime.threads.executor import SerialExecutor

UNREGISTER_S = 1.0
"""Time limit for removing the name of an actor that has ended, in seconds."""


@frozen(kw_only=True)
class LightActorBatch:
    """Light actors to be made of one class with the same arguments."""

    # Pickled once for a batch: a thousand actors of one class would otherwise carry it a thousand times.
    cls: bytes
    """Pickled class."""
    arguments: bytes
    """Pickle of ``(args, kwargs)``; each actor gets a copy of its own."""
    numbers: tuple[int, ...]
    names: tuple[str, ...]
    indices: tuple[int, ...]
    config: ActorConfig
    group: str = ""
    registered: bool = False
    """True if their names are bound in the namespace, each to one actor."""

    def select(self, positions: Sequence[int]) -> LightActorBatch:
        """Return a batch of the actors at these positions."""
        return evolve(
            self,
            numbers=tuple(self.numbers[position] for position in positions),
            names=tuple(self.names[position] for position in positions),
            indices=tuple(self.indices[position] for position in positions),
        )


@frozen
class ActorEnded:
    """Event: a light actor has ended for good.

    ``error`` is what it failed with, if it did, as `errors.dump_error` gives it.
    """

    number: int
    text: str
    error: bytes | None
    constructing: bool = False
    """True if its constructor raised: this incarnation served no call."""


@frozen
class EndedBefore:
    """Event: light actors that ended for good before the reader came, of which no reason is known any longer."""

    numbers: Ranges


Event: TypeAlias = int | ActorEnded | EndedBefore
"""An end, many old ends, or the number of an actor that is ready."""


class LightActorHost:
    """Actor of a process of light actors."""

    def __init__(self) -> None:
        me = current_lifecycle()
        assert me is not None
        self.runtime = current()
        self.host = host_of(self.runtime)
        self.actor_id = me.actor_id
        self._actors: dict[int, LightActor] = {}
        # One class object for equal pickles, so that all actors of a class share it, and `isinstance` between them
        # holds.
        self._classes: dict[bytes, type] = {}
        # Only the last event of each number is kept: a reader that is slow or new needs the state, not the history.
        self._events: dict[int, tuple[int, Event]] = {}
        """Last event of each number, with the count of events before it; in order."""
        self._count = 0
        self._ends = 0
        """Number of `ActorEnded` among the events."""
        self._old_ends = RangeSet()
        """Ends that are no longer among the events."""
        self._readers: dict[object, int] = {}
        """Number of events at the time of each reader's last read."""
        self._changed = trio.Event()
        self._context = copy_context()

    async def ping(self) -> None:
        """Return: the process answers. For health checks."""

    # Called by the owner ---------------------------------------------------------------------------------------------

    async def create(self, batch: LightActorBatch) -> None:
        """Start those that are not there yet. Return when their names are registered, not when they are made."""
        new = [
            self._reserve(batch, position)
            for position, number in enumerate(batch.numbers)
            # A request may be repeated, and after a restart of the owner's connection the whole set is sent again.
            if number not in self._actors and not self.host.pending.has_ended(number)
        ]
        # Names first, all or none: an actor that runs under a name which another holds could not be found.
        if batch.registered:
            await self._register(new)
        for actor in new:
            actor.start()

    async def reconcile(self, batches: Sequence[LightActorBatch], ended: Ranges) -> AsyncIterator[tuple[Event, ...]]:
        """Start the actors that are to live and are not there; then yield `events`.

        Args:
            ended: numbers of those that have ended for good.
        """
        # First, so that calls of ended actors are refused while the others are still being made.
        if ended:
            self._old_ends.update(ended)
            self.host.pending.ended.update(ended)
            self._record(EndedBefore(ended))
        for batch in batches:
            await self.create(batch)
        async for events in self.events():
            yield events

    async def events(self) -> AsyncIterator[tuple[Event, ...]]:
        """Yield the present state as events, then what happens.

        Of several events of one actor between two reads only the last is yielded.
        """
        reader = object()
        self._readers[reader] = 0
        try:
            # In case the reader comes later than some ends: without them it would wait for actors that are gone.
            yield (EndedBefore(self._old_ends.ranges),)
            while True:
                events = self._since(self._readers[reader])
                # Marked as read before the yield; the reader's call may be cancelled there, and then the entry is
                # removed.
                self._readers[reader] = self._count
                if events:
                    yield events
                else:
                    await self._changed.wait()
        finally:
            del self._readers[reader]

    def _since(self, position: int) -> tuple[Event, ...]:
        # Entries are moved to the end when they change, so only the new ones are looked at.
        newest_first = takewhile(lambda entry: entry[0] >= position, reversed(self._events.values()))
        return tuple(event for _, event in newest_first)[::-1]

    async def end_calls(self, numbers: Sequence[int]) -> None:
        """End the calls of actors that are ending and whose calls do not finish."""
        for number in numbers:
            if number in self._actors:
                self._actors[number].end_calls()

    async def count(self) -> int:
        """Return how many light actors live here."""
        return len(self._actors)

    async def __fray_cleanup__(self) -> None:
        # At once: the process has one limit for its cleanup, whatever the number of its actors.
        async with trio.open_nursery() as nursery:
            for actor in self._actors.values():
                nursery.start_soon(actor.shut_down)

    # Actors of this host ---------------------------------------------------------------------------------------------

    def _reserve(self, batch: LightActorBatch, position: int) -> LightActor:
        cls = self._classes.get(batch.cls)
        if cls is None:
            cls = self._classes[batch.cls] = pickling.loads(batch.cls)
        number = batch.numbers[position]
        actor = self._actors[number] = LightActor(self, cls, batch, position)
        # From now on calls wait for it without a time limit: it will be made or fail.
        self.host.pending.expected.add(number)
        return actor

    async def _register(self, actors: Sequence[LightActor]) -> None:
        try:
            for actor in actors:
                await registrations_of(self.runtime).add(actor.endpoint(), exclusive=True)
        # All or none: those that have got their names give them back.
        except FrayError:
            for actor in actors:
                del self._actors[actor.number]
                self.host.pending.expected.discard(actor.number)
                await actor.unregister()
            raise

    def spawn(self, task: Callable[[], Any]) -> None:
        """Run a task of this host, in no call's context."""
        # A task must not inherit the call that happens to start it: its deadline and its chain are not the actor's.
        self._context.copy().run(self.host.spawn, task)

    def on_ended(self, actor: LightActor, ending: ShutdownRequest) -> None:
        """Record that an actor has ended for good."""
        self._actors.pop(actor.number, None)
        error = None if ending.error is None else errors.dump_error(ending.error)
        self._record(ActorEnded(actor.number, ending.text, error, ending.constructing))

    def on_ready(self, actor: LightActor) -> None:
        """Record that an actor is ready (again)."""
        self._record(actor.number)

    def _record(self, event: Event) -> None:
        number = event.number if isinstance(event, ActorEnded) else event if isinstance(event, int) else 0
        # Removed first, so that the number moves to the end of the order.
        self._events.pop(number, None)
        self._events[number] = self._count, event
        self._count += 1
        self._ends += isinstance(event, ActorEnded)
        # Rarely, as it looks at all events.
        if self._ends > 2 * ENDS_KEPT and self._count % ENDS_KEPT == 0:
            self._forget_old_ends()
        self._changed.set()
        self._changed = trio.Event()

    def _forget_old_ends(self) -> None:
        """Keep only the numbers of old ends that all readers have got."""
        # The slowest reader decides. Without any reader nothing is forgotten.
        read = min(self._readers.values(), default=0)
        old = [number for number, (at, event) in self._events.items() if isinstance(event, ActorEnded) and at < read]
        for number in old[: self._ends - ENDS_KEPT]:
            del self._events[number]
            self._old_ends.add(number)
            self._ends -= 1


class LightActor:
    """Light actor in this process, through all its incarnations here."""

    __slots__ = (
        "_batch",
        "_began",
        "_cls",
        "_executor",
        "_host",
        "_hosted",
        "_lifecycle",
        "_restarts",
        "index",
        "name",
        "number",
    )

    def __init__(self, host: LightActorHost, cls: type, batch: LightActorBatch, position: int) -> None:
        self._host = host
        self._cls = cls
        self._batch = batch
        self.number = batch.numbers[position]
        self.name = batch.names[position]
        self.index = batch.indices[position]
        self._restarts: RestartCounter | None = None
        self._executor: SerialExecutor | None = None
        self._hosted: ServedActor | None = None
        self._lifecycle: ActorLifecycle | None = None
        self._began = 0.0

    @property
    def actor_id(self) -> str:
        return light_actor_id(self._host.actor_id, self.number)

    def endpoint(self) -> ActorEndpoint:
        return make_endpoint(self._host.runtime, self.actor_id, self.name, self.number)

    async def unregister(self) -> None:
        """Remove its name, if it has one."""
        if self._batch.registered:
            with trio.move_on_after(UNREGISTER_S):
                try:
                    await registrations_of(self._host.runtime).remove(self.actor_id)
                except FrayError:
                    pass  # the conversation has ended, and the name with it

    # Start -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Make the object: here, or on its thread if its class is all sync."""
        batch, host = self._batch, self._host
        self._began = trio.current_time()
        self._lifecycle = ActorLifecycle(
            self.actor_id,
            self.name,
            self._cls,
            incarnation=host.runtime.session,
            group=batch.group,
            index=self.index,
        )
        construction = _Construction(self, self._lifecycle, batch.arguments)
        if has_async_methods(self._cls):
            # Classes with async methods live in the loop, and so does their constructor.
            construction.run()
            construction.done()
            return
        if self._executor is None:
            self._executor = host.host.make_light_executor(self.name, batch.config.max_concurrency or 1)
        self._executor.submit(construction)
        self._executor.flush()

    def serve(self, instance: Any) -> None:
        """Serve the object from now on."""
        host, config, lifecycle = self._host.host, self._batch.config, self._lifecycle
        assert lifecycle is not None
        host.register(
            instance,
            self.name,
            actor_id=self.actor_id,
            max_concurrency=config.max_concurrency,
            concurrency_groups=config.concurrency_groups,
            executor=self._executor,
            lifecycle=lifecycle,
            number=self.number,
        )
        self._hosted = host.actors[self.number]
        # Before `set_on_ending`, which may end the actor at once if its constructor has asked for that.
        self._host.on_ready(self)
        lifecycle.set_on_ending(self._on_ending)
        if config.idle_s is not None and lifecycle.ending is None:
            self._host.spawn(partial(end_when_idle, self._hosted, lifecycle, config.idle_s))

    def on_constructor_failed(self, error: BaseException) -> None:
        """Restart later, or end for good: the constructor has raised."""
        delay_s = self._restart_delay_s(error)
        if delay_s is None:
            ending = ShutdownRequest(
                f"its constructor raised {type(error).__name__}: {error}", error, constructing=True
            )
            # At once, so that waiting calls fail with the constructor's error.
            self._record_end(ending)
            self._host.spawn(partial(self._remove, ending))
        else:
            self._host.spawn(partial(self._restart_after, delay_s))

    # End -------------------------------------------------------------------------------------------------------------

    def _on_ending(self) -> None:
        """End as requested. From now on its calls wait for the next incarnation, or are refused if there is none."""
        hosted, lifecycle = self._hosted, self._lifecycle
        assert hosted is not None
        assert lifecycle is not None
        assert lifecycle.ending is not None
        pending = self._host.host.pending
        # First: from now on a call finds no actor and waits, or is refused, in `pending`.
        self._host.host.actors.pop(self.number, None)
        lifecycle.set_shutdown_event()
        # An orderly end is for good; only failures are restarted.
        delay_s = None if lifecycle.ending.error is None else self._restart_delay_s(lifecycle.ending.error)
        if delay_s is None:
            hosted.close(self._record_end(lifecycle.ending))
        else:
            pending.expected.add(self.number)
            # Not begun, so the next incarnation may run them.
            for call in hosted.take_queued():
                # Otherwise a cancellation would go to the actor that is ending.
                call.actor = None
                pending.hold(self.number, call.origin, call)
            hosted.close(lifecycle.ending.refusal_error(self.name))
        self._host.spawn(partial(self._end, hosted, lifecycle, lifecycle.ending, delay_s))

    def _record_end(self, ending: ShutdownRequest) -> ActorDied:
        error = ActorDied(f"actor {self.name} is gone: {ending.text}", actor=self.name, **{ENDED_HERE: ending.text})
        if ending.error is not None:
            dumped = errors.dump_error(ending.error)
            error.__cause__ = errors.load_error(dumped)  # the error itself would keep its frames alive
            if ending.constructing:
                error.details[RAISED] = dumped
        self._host.host.pending.record_end(self.number, error)
        return error

    async def _end(
        self, hosted: ServedActor, lifecycle: ActorLifecycle, ending: ShutdownRequest, delay_s: float | None
    ) -> None:
        # Orderly: what is under way finishes. A failed actor's calls are ended by `shut_down`.
        if ending.error is None:
            await hosted.wait_idle()
        with trio.CancelScope(shield=True):
            await shut_down(hosted, lifecycle, self._batch.config.cleanup_s)
        self._hosted = None
        if delay_s is None:
            await self._remove(ending)
        else:
            await self._restart_after(delay_s)

    async def _remove(self, ending: ShutdownRequest) -> None:
        # Not before a restart: the next incarnation uses the same queue of the shared threads.
        if self._executor is not None:
            self._executor.stop()
        # The name is free before the end is reported, so its owner may use it again at once.
        await self.unregister()
        self._host.on_ended(self, ending)

    async def _restart_after(self, delay_s: float) -> None:
        await trio.sleep(delay_s)
        self.start()

    def _restart_delay_s(self, error: BaseException) -> float | None:
        """Return the seconds until its restart; None if it is not restarted."""
        if self._restarts is None:
            self._restarts = RestartCounter(self._batch.config)
        now = trio.current_time()
        # A life longer than the longest back-off starts the back-off again from its shortest.
        return self._restarts.on_failure(now, now - self._began)

    def end_calls(self) -> None:
        """End its calls now, if it is ending."""
        if self._hosted is not None and self._lifecycle is not None and self._lifecycle.ending is not None:
            self._hosted.end_calls(None)

    async def shut_down(self) -> None:
        """Shut down with its process."""
        if self._hosted is not None and self._lifecycle is not None:
            await shut_down(self._hosted, self._lifecycle, self._batch.config.cleanup_s)


class _Construction:
    """The construction of a light actor, as a work item of its executor."""

    def __init__(self, actor: LightActor, lifecycle: ActorLifecycle, arguments: bytes) -> None:
        self._actor = actor
        self._lifecycle = lifecycle
        self._arguments = arguments
        self._instance: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            args, kwargs = pickling.loads(self._arguments)
            self._instance = make_instance(self._lifecycle, args, kwargs)
        except BaseException as error:  # noqa: BLE001 - it is the actor's end
            self._error = error

    def done(self) -> None:
        if self._error is not None:
            self._actor.on_constructor_failed(self._error)
        else:
            self._actor.serve(self._instance)
