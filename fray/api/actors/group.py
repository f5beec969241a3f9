"""Groups of actors: the same actor many times, created together.

The state of a group comes from the actor registry and not from the process that created it, so a group can be pickled
and used anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, overload

import trio

from fray.api.actors.handle import ActorHandle, actor_id_of, label_of
from fray.errors import ActorDied, DeadlineExceeded, GroupFailed, InvalidRequest, NoSuchJob
from fray.model.actors import ActorStatus
from fray.model.messages.client import Terminate
from fray.runtime import waits
from fray.runtime.actors.status_watch import ActorStatusWatch, request_end
from fray.runtime.runtime import Runtime, current
from fray.type_variables import A_co

END_S = 30.0
"""Default seconds that `ActorGroup.shutdown` lets running calls finish."""


H = TypeVar("H", covariant=True)


class Members(Generic[H]):
    """Sequence of the handles of a group."""

    _handles: tuple[H, ...]

    @property
    def handles(self) -> list[H]:
        """All members, in order of their index."""
        return list(self._handles)

    def __len__(self) -> int:
        return len(self._handles)

    def __iter__(self) -> Iterator[H]:
        return iter(self._handles)

    @overload
    def __getitem__(self, index: int) -> H: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[H, ...]: ...
    def __getitem__(self, index: int | slice) -> H | tuple[H, ...]:
        return self._handles[index]


class ActorGroup(Members[ActorHandle[A_co]]):
    """Actors of one class ``A_co``, in order. Made by `Scope.create_actor_group`; picklable.

    It is a sequence of its handles, whether or not the members are ready: a call of a member waits until it is ready.
    """

    def __init__(self, name: str, handles: Sequence[ActorHandle[A_co]], runtime: Runtime | None = None) -> None:
        self.name = name
        self._handles = tuple(handles)
        self._runtime = runtime
        self._watches: list[ActorStatusWatch] = []
        self._changed = trio.Event()
        self._returned: set[int] = set()

    def statuses(self) -> list[ActorStatus]:
        """Return the status of each member, as far as is known here now."""
        return [watch.status for watch in self._follow()]

    @property
    def ready_count(self) -> int:
        """Number of members that are ready now, as far as is known here."""
        return sum(watch.is_ready for watch in self._follow())

    def is_done(self) -> bool:
        """Return whether no member that is not ready now can ever become ready."""
        return all(watch.is_ready or watch.has_ended for watch in self._follow())

    async def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle[A_co]]:
        """Wait until ``count`` members (default: all) are ready at once; return all that are, in order of their index.

        The list is a snapshot: call this again for a later one.

        Raises:
            GroupFailed: (a RuntimeError) so many members have ended for good that this is impossible; its cause is the
                end of the first of them, or the exception of its constructor.
            DeadlineExceeded: (a TimeoutError) not within ``timeout`` seconds.
            InvalidRequest: ``count`` is above the number of members, or negative.
        """
        wanted = len(self) if count is None else count
        if not 0 <= wanted <= len(self):
            raise InvalidRequest(f"wait_ready({wanted}): group {self.name!r} has {len(self)} members")
        watches = self._follow()
        with trio.move_on_after(max(0.0, timeout)), waits.waiting():
            while self.ready_count < wanted:
                self._check_possible(watches, wanted)
                await self._changed.wait()
            return self._take([index for index, watch in enumerate(watches) if watch.is_ready])
        raise DeadlineExceeded(
            f"{self.ready_count} of {wanted} members of group {self.name!r} are ready after {timeout:g} s",
            group=self.name,
        )

    def discover_new(self) -> list[ActorHandle[A_co]]:
        """Return the members that are ready now and that neither `wait_ready` nor this method has returned before."""
        ready = [index for index, watch in enumerate(self._follow()) if watch.is_ready]
        return self._take([index for index in ready if index not in self._returned])

    def _take(self, indices: Sequence[int]) -> list[ActorHandle[A_co]]:
        self._returned.update(indices)
        return [self._handles[index] for index in indices]

    def _check_possible(self, watches: Sequence[ActorStatusWatch], wanted: int) -> None:
        ended = [index for index, watch in enumerate(watches) if watch.has_ended]
        if len(self) - len(ended) < wanted:
            first = watches[ended[0]]
            raise GroupFailed(
                f"group {self.name!r} can never have {wanted} members ready: {len(ended)} of {len(self)} have ended "
                f"for good; number {ended[0]}: {first.end_text}",
                group=self.name,
                ended=ended,
            ) from first.call_error(label_of(self._handles[ended[0]]))

    # State -----------------------------------------------------------------------------------------------------------

    def _runtime_here(self) -> Runtime:
        if self._runtime is None:
            self._runtime = current()
        return self._runtime

    def _follow(self) -> list[ActorStatusWatch]:
        """Return the watches of the members. The first call starts them; they last as long as this object."""
        if not self._watches:
            runtime = self._runtime_here()
            self._watches = [ActorStatusWatch(runtime, actor_id_of(handle), self._notify) for handle in self._handles]
        return self._watches

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # End -------------------------------------------------------------------------------------------------------------

    async def shutdown(self, grace_s: float = END_S) -> None:
        """End all members in order: they accept no more calls and have ``grace_s`` seconds to finish those that are
        running.

        Returns when all have ended. May be called again.

        Raises:
            ConnectionFailed: the connection to the controller has ended.
        """
        runtime, watches = self._runtime_here(), self._follow()
        for record in runtime.client.jobs.known([watch.actor_id for watch in watches]):
            record.end_requested = True
        with trio.move_on_after(grace_s):
            await self._end_in_order(watches)
            await self._wait_ended([watch for watch in watches if watch.is_ready])
        await self._cancel_light_calls([watch for watch in watches if watch.is_light and not watch.has_ended])
        living = tuple(watch.home for watch in watches if not watch.has_ended and not watch.is_light)
        if living:
            await runtime.client.request(Terminate(jobs=living, reason=f"group {self.name!r} was shut down"))
        async with trio.open_nursery() as nursery:
            for watch in watches:
                if watch.is_light:
                    nursery.start_soon(self._end_returned, watch)
        await self._wait_ended(watches)

    async def _end_returned(self, watch: ActorStatusWatch) -> None:
        """End a light actor that has not received the request, because its host was silent or restarting."""
        while not watch.has_ended:
            was_ready = watch.is_ready
            await self._changed.wait()
            if watch.is_ready and not was_ready:
                await self._end_in_order([watch])
                await self._cancel_light_calls([watch])

    async def _wait_ended(self, watches: Sequence[ActorStatusWatch]) -> None:
        """Wait for the end of the members' jobs.

        The registry marks an actor as ended as soon as its end is decided; the end of its job comes later.
        """
        for watch in watches:
            while watch.is_light and not watch.has_ended:
                await self._changed.wait()
            if not watch.is_light:
                with suppress(NoSuchJob):  # it ended so long ago that the controller has forgotten it
                    (record,) = await self._runtime_here().client.jobs.watch([watch.home])
                    await record.ended.wait()

    async def _cancel_light_calls(self, living: Sequence[ActorStatusWatch]) -> None:
        """Make the hosts of light actors cancel the calls that have not finished."""
        caller = self._runtime_here().caller
        for home in {watch.home for watch in living}:
            numbers = [watch.number for watch in living if watch.home == home]
            with suppress(ActorDied):
                await caller.route(f"actor:{home}").call("end_calls", (numbers,))

    async def _end_in_order(self, watches: Sequence[ActorStatusWatch]) -> None:
        async with trio.open_nursery() as nursery:
            for watch in watches:
                nursery.start_soon(request_end, self._runtime_here(), watch, f"its group {self.name!r} was shut down")

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorGroup, (self.name, self._handles))

    def __repr__(self) -> str:
        return f"<ActorGroup {self.name!r} of {len(self)}>"
