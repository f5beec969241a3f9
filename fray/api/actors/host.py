"""Hosts of light actors: many actors in one process. See docs/light-actors.md."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Concatenate, ParamSpec, TypeVar, TypeVarTuple, overload

import trio

from fray.api.actors.group import ActorGroup
from fray.api.actors.handle import (
    ActorHandle,
    actor_id_of,
    label_of,
    methods_of,
)
from fray.api.jobs.job_spec import GROUP_LIMIT, check_count, default_name
from fray.api.on_failure import OnFailure
from fray.errors import ActorDied, InvalidRequest, OutcomeUnknown
from fray.model.ids import check_name, light_actor_id, mint_name
from fray.model.messages.large_values import check_size
from fray.model.specs import ActorConfig
from fray.runtime.actors.light import (
    ActorEnded,
    EndedBefore,
    Event,
    LightActorBatch,
)
from fray.runtime.actors.methods import check_concurrency
from fray.runtime.actors.pending_calls import FIRST_LIGHT
from fray.runtime.calls.range_set import LONG_AGO, RangeSet
from fray.runtime.controller_client.jobs import JobRecord
from fray.runtime.runtime import Runtime
from fray.runtime.serialization import errors, pickling

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")
First = TypeVar("First")
BATCHES_KEPT = 64
"""Number of batches to which ended ones may accumulate, beyond two per actor, before they are dropped."""


class ActorHost:
    """Process for light actors; made by `Scope.create_host`. It ends with its scope, and its actors end with it.

    Light actors are called, named, restarted, ended and cleaned up like others. They share a process: its memory, its
    loop (classes with an async method), and a pool of threads (all-sync classes; the calls of each run in order).
    """

    def __init__(self, runtime: Runtime, record: JobRecord, handle: ActorHandle, on_failure: OnFailure) -> None:
        self._runtime = runtime
        self._record = record
        self._handle = handle
        self._on_failure = on_failure
        self._numbers = count(FIRST_LIGHT)
        self._batches: list[LightActorBatch] = []
        self._handles: dict[int, ActorHandle] = {}
        """Handles of the actors that live or may start, by their numbers in the host."""
        self._ended = RangeSet()

    @property
    def name(self) -> str:
        return label_of(self._handle)

    @overload
    async def create_actor(self, cls: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> ActorHandle[T]: ...
    @overload
    async def create_actor(
        self,
        cls: Callable[[*Ts], T],
        /,
        *args: *Ts,
        name: str | None = None,
        actor_config: ActorConfig | None = None,
    ) -> ActorHandle[T]: ...
    @overload
    async def create_actor(self, cls: Callable[..., T], /, *, name: str | None, **kwargs: Any) -> ActorHandle[T]: ...  # type: ignore[overload-cannot-match]
    @overload
    async def create_actor(  # type: ignore[overload-cannot-match]
        self, cls: Callable[..., T], /, *, actor_config: ActorConfig | None, **kwargs: Any
    ) -> ActorHandle[T]: ...
    @overload
    async def create_actor(
        self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, name: str | None, **kwargs: Any
    ) -> ActorHandle[T]: ...

    async def create_actor(  # type: ignore[misc]
        self,
        /,
        cls: Any,
        *args: Any,
        name: str | None = None,
        actor_config: ActorConfig | None = None,
        **kwargs: Any,
    ) -> ActorHandle:
        """Create ``cls(*args, **kwargs)`` in this host's process; return a handle that can be used at once.

        Args:
            name: unique among the living of the namespace; with a name, this waits until the host has registered it.
                Default: a generated name, which is not registered.
            actor_config: as for `Scope.create_actor`. Restarts happen within the process; ``cleanup_s`` is at most 5
                when the process ends.

        Raises:
            InvalidRequest, NotPicklable, MessageTooLarge: nothing was created.
            NameInUse: a living actor has the name.
            ActorDied: the host has ended.
        """
        names = (name or mint_name(default_name(cls), self._runtime.rng),)
        return (await self._create(cls, args, kwargs, names, "", actor_config, registered=name is not None))[0]

    @overload
    async def create_actors(
        self,
        cls: Callable[[*Ts], T],
        /,
        *args: *Ts,
        count: int,
        name: str | None = None,
        actor_config: ActorConfig | None = None,
    ) -> ActorGroup[T]: ...
    @overload
    async def create_actors(self, cls: Callable[..., T], /, *, count: int, **kwargs: Any) -> ActorGroup[T]: ...
    @overload
    async def create_actors(
        self, cls: Callable[Concatenate[First, ...], T], arg: First, /, *, count: int, **kwargs: Any
    ) -> ActorGroup[T]: ...

    async def create_actors(  # type: ignore[misc]
        self,
        /,
        cls: Any,
        *args: Any,
        count: int,
        name: str | None = None,
        actor_config: ActorConfig | None = None,
        **kwargs: Any,
    ) -> ActorGroup:
        """Create the same light actor ``count`` times, in one message; returns at once.

        They are named ``{name}-{index}`` in messages; these names are not registered. Args and errors as for
        `create_actor`.
        """
        label = name or mint_name(default_name(cls), self._runtime.rng)
        check_count(label, count)
        names = tuple(f"{label}-{index}" for index in range(count))
        handles = await self._create(cls, args, kwargs, names, label, actor_config, registered=False)
        return ActorGroup(label, handles, self._runtime)

    async def _create(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: tuple[str, ...],
        group: str,
        config: ActorConfig | None,
        *,
        registered: bool,
    ) -> list[ActorHandle]:
        batch = self._batch(cls, args, kwargs, names, group, config or ActorConfig(), registered)
        home, methods = actor_id_of(self._handle), methods_of(cls)
        handles = [
            ActorHandle(light_actor_id(home, number), label, methods, self._runtime)
            for number, label in zip(batch.numbers, names, strict=True)
        ]
        self._handles.update(zip(batch.numbers, handles, strict=True))
        self._batches.append(batch)
        created = self._handle.create.start(batch)
        if registered:
            try:
                await created
            except OutcomeUnknown:
                pass  # the host is restarting: `keep` sends it all living batches
            except BaseException:
                self._batches.remove(batch)
                for number in batch.numbers:
                    self._handles.pop(number, None)
                    self._ended.add(number)
                raise
        return handles

    def _batch(
        self,
        cls: type,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        names: tuple[str, ...],
        group: str,
        config: ActorConfig,
        registered: bool,
    ) -> LightActorBatch:
        if not isinstance(cls, type):
            raise InvalidRequest(f"create_actor needs a class, not {cls!r}")
        # Calls may know the end before the controller's report of the job comes.
        if self._record.ended.is_set() or self._handle._connection_route().is_gone:
            raise ActorDied(f"host {self.name} has ended: no actor can be created in it")
        if len(self._handles) + len(names) > GROUP_LIMIT:
            raise InvalidRequest(
                f"host {self.name} has {len(self._handles)} actors; the limit is {GROUP_LIMIT:,}: create another"
            )
        for name in names[:1] + names[-1:]:
            check_name(name, "an actor")
        if config.health is not None:
            raise InvalidRequest(
                "health checks are not supported for light actors (they share a process): use an actor of its own"
            )
        check_concurrency(cls, config.max_concurrency, config.concurrency_groups)
        arguments = pickling.dumps_arguments(cls, args, kwargs, f"actor {names[0]!r}")
        check_size(len(arguments), f"actor {names[0]!r}: its arguments")
        return LightActorBatch(
            cls=pickling.dumps(cls, f"class {cls.__name__}"),
            arguments=arguments,
            numbers=tuple(next(self._numbers) for _ in names),
            names=names,
            indices=tuple(range(len(names))),
            config=config,
            group=group,
            registered=registered,
        )

    # Supervision -----------------------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Create the living actors again in each new incarnation of the host, and process the ends of actors; as long
        as the host lives.
        """
        route = self._handle._connection_route()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_ended, nursery.cancel_scope)
            while True:
                try:
                    async with self._handle.reconcile.stream(self._living(), self._ended.ranges) as batches:
                        async for events in batches:
                            for event in events:
                                for ended in self._ends_in(event):
                                    self._on_ended(ended)
                except ActorDied:
                    await route.wait_while_silent()  # the next stream waits for the next incarnation or the end
                    if route.is_gone:
                        # It has ended for good, and each further stream would fail at once: the end of a scope, for
                        # one, is known here before the controller confirms it, which may be away.
                        await self._record.ended.wait()
                    if self._record.ended.is_set():
                        return

    async def _until_ended(self, scope: trio.CancelScope) -> None:
        await self._record.ended.wait()
        scope.cancel()

    def _ends_in(self, event: Event) -> list[ActorEnded]:
        """Return the ended actors of an event. `EndedBefore` has only their numbers: this owner was disconnected for
        too long.
        """
        if isinstance(event, EndedBefore):
            ended = [number for first, last in event.numbers for number in self._handles if first <= number <= last]
            return [ActorEnded(number, LONG_AGO, None) for number in ended]
        return [event] if isinstance(event, ActorEnded) else []

    def _living(self) -> list[LightActorBatch]:
        living = []
        for batch in self._batches:
            places = [place for place, number in enumerate(batch.numbers) if number not in self._ended]
            if len(places) == len(batch.numbers):
                living.append(batch)
            elif places:
                living.append(batch.select(places))
        self._batches = living
        return living

    def _on_ended(self, ended: ActorEnded) -> None:
        if ended.number in self._ended:
            return
        self._ended.add(ended.number)
        handle = self._handles.pop(ended.number, None)
        if len(self._batches) > 2 * len(self._handles) + BATCHES_KEPT:
            self._living()
        if ended.error is None or handle is None:
            return
        error = errors.load_error(ended.error)
        error.add_note(f"raised in light actor {label_of(handle)} of host {self.name}")
        decision = self._on_failure(handle, error) if callable(self._on_failure) else self._on_failure
        if decision == "escalate":
            raise error

    def __repr__(self) -> str:
        return f"<ActorHost {self.name}: {len(self._handles)} actors>"
