"""Groups: the same actor many times over, made together, there one after another.

A group is seen through the directory, not through its maker: it is a value, and works wherever it arrives.
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
from fray.runtime.actors.status_watch import ActorStatusWatch, request_end
from fray.runtime.runtime import Runtime, current

END_S = 30.0
"""How long `ActorGroup.shutdown` lets running calls finish unless told otherwise."""


H = TypeVar("H")


class Members(Generic[H]):
    """The handles of a group as a sequence."""

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


class ActorGroup(Members[ActorHandle]):
    """Actors of one class, in order. Made by `Scope.create_actor_group`; picklable.

    It has the length, the indices and the iteration of a sequence of its handles, ready or not: a call to one that is
    not ready waits until it is.
    """

    def __init__(self, name: str, handles: Sequence[ActorHandle], runtime: Runtime | None = None) -> None:
        self.name = name
        self._handles = tuple(handles)
        self._runtime = runtime
        self._presences: list[ActorStatusWatch] = []
        self._changed = trio.Event()
        self._given: set[int] = set()

    def statuses(self) -> list[ActorStatus]:
        """How each member stands, as far as is known here now."""
        return [presence.status for presence in self._follow()]

    @property
    def ready_count(self) -> int:
        """Members that are there now, as far as is known here."""
        return sum(presence.is_ready for presence in self._follow())

    def is_done(self) -> bool:
        """Whether no member that is not there now can ever come."""
        return all(presence.is_ready or presence.has_ended for presence in self._follow())

    async def wait_ready(self, count: int | None = None, timeout: float = 300.0) -> list[ActorHandle]:
        """Wait until ``count`` members (default: all) are there at once; returns all that are, in order of index.

        The list is a snapshot: ask again for a later one.

        Raises:
            GroupFailed: (a RuntimeError) so many members have ended for good that it can never be; its cause is the
                end of the first of them, or what its constructor raised.
            DeadlineExceeded: (a TimeoutError) not within ``timeout`` seconds.
            InvalidRequest: ``count`` is more than there are members, or negative.
        """
        wanted = len(self) if count is None else count
        if not 0 <= wanted <= len(self):
            raise InvalidRequest(f"wait_ready({wanted}): group {self.name!r} has {len(self)} members")
        presences = self._follow()
        with trio.move_on_after(max(0.0, timeout)):
            while self.ready_count < wanted:
                self._check_possible(presences, wanted)
                await self._changed.wait()
            return self._give([index for index, presence in enumerate(presences) if presence.is_ready])
        raise DeadlineExceeded(
            f"{self.ready_count} of {wanted} members of group {self.name!r} are ready after {timeout:g} s",
            group=self.name,
        )

    def discover_new(self) -> list[ActorHandle]:
        """Members that are there now and that neither `wait_ready` nor this method has returned before."""
        ready = [index for index, presence in enumerate(self._follow()) if presence.is_ready]
        return self._give([index for index in ready if index not in self._given])

    def _give(self, indices: Sequence[int]) -> list[ActorHandle]:
        self._given.update(indices)
        return [self._handles[index] for index in indices]

    def _check_possible(self, presences: Sequence[ActorStatusWatch], wanted: int) -> None:
        over = [index for index, presence in enumerate(presences) if presence.has_ended]
        if len(self) - len(over) < wanted:
            first = presences[over[0]]
            raise GroupFailed(
                f"group {self.name!r} can never have {wanted} members ready: {len(over)} of {len(self)} have ended for "
                f"good; number {over[0]}: {first.end_text}",
                group=self.name,
                ended=over,
            ) from first.call_error(label_of(self._handles[over[0]]))

    # Seeing them -----------------------------------------------------------------------------------------------------

    def _here(self) -> Runtime:
        if self._runtime is None:
            self._runtime = current()
        return self._runtime

    def _follow(self) -> list[ActorStatusWatch]:
        """From the first question on, the directory is followed as long as this object lives."""
        if not self._presences:
            runtime = self._here()
            self._presences = [ActorStatusWatch(runtime, actor_id_of(handle), self._notify) for handle in self._handles]
        return self._presences

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # The end ---------------------------------------------------------------------------------------------------------

    async def shutdown(self, grace_s: float = END_S) -> None:
        """End all members in order: they take no more calls and have ``grace_s`` seconds to finish those under way.

        Returns when all have ended. May be repeated; members that have ended are left alone.

        Raises:
            ConnectionFailed: the conversation with the controller has ended.
        """
        runtime, presences = self._here(), self._follow()
        for record in runtime.link.jobs.known([presence.actor_id for presence in presences]):
            record.asked_to_end = True
        with trio.move_on_after(grace_s):
            await self._end_in_order(presences)
            await self._wait_ended([presence for presence in presences if presence.is_ready])
        await self._cut_light([presence for presence in presences if presence.is_light and not presence.has_ended])
        left = tuple(presence.home for presence in presences if not presence.has_ended and not presence.is_light)
        if left:
            await runtime.link.request(Terminate(jobs=left, reason=f"group {self.name!r} was shut down"))
        await self._wait_ended(presences)

    async def _wait_ended(self, presences: Sequence[ActorStatusWatch]) -> None:
        """The directory calls an actor ended as soon as its end is decided; its job tells when it really is."""
        for presence in presences:
            while presence.is_light and not presence.has_ended:
                await self._changed.wait()
            if not presence.is_light:
                with suppress(NoSuchJob):  # so long over that it has been forgotten
                    (record,) = await self._here().link.jobs.watch([presence.home])
                    await record.ended.wait()

    async def _cut_light(self, left: Sequence[ActorStatusWatch]) -> None:
        """Light actors that do not come to an end of their calls: their hosts cut them short."""
        caller = self._here().caller
        for home in {presence.home for presence in left}:
            numbers = [presence.number for presence in left if presence.home == home]
            with suppress(ActorDied):
                await caller.route(f"actor:{home}").call("end_calls", (numbers,))

    async def _end_in_order(self, presences: Sequence[ActorStatusWatch]) -> None:
        async with trio.open_nursery() as nursery:
            for presence in presences:
                nursery.start_soon(request_end, self._here(), presence, f"its group {self.name!r} was shut down")

    def __reduce__(self) -> tuple[Any, ...]:
        return (ActorGroup, (self.name, self._handles))

    def __repr__(self) -> str:
        return f"<ActorGroup {self.name!r} of {len(self)}>"
