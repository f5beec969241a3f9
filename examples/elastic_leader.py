"""Leader actor of `elastic_slices.py`, which makes a multi-slice of the present members, round by round."""

from __future__ import annotations

from typing import NamedTuple

import trio

import elastic_model as model
import fray
from fray import ReservationEventKind

KILL_AFTER = 20
"""Rounds before ``--kill`` kills a member."""


class Round(NamedTuple):
    """Work of a member: the step, and its part of it."""

    number: int
    step: int
    rank: int
    size: int
    weights: model.Array
    doomed: bool = False
    """True if the member shall end by SIGKILL with its part."""


class Waiting:
    """Member that waits for the next round, with its result of the last."""

    def __init__(self, number: int | None, gradient: model.Array | None) -> None:
        self.number, self.gradient = number, gradient
        self.over = trio.Event()
        self.answer: Round | None = None


class Leader:
    """Makes rounds: a round starts when all present members wait for one. If all parts of the round before have
    arrived, it is the next step; if a member left with its part, the remaining members repeat the step."""

    def __init__(self, kill_one: bool = False) -> None:
        self._kill_one = kill_one
        self._steps: int | None = None
        self._weights = model.fresh()
        self._number = 0
        self._world: tuple[str, ...] = ()
        self._sizes: list[int] = []
        self._redone = 0
        self._members: dict[str, Waiting | None] = {}
        self._leaving: set[str] = set()
        self._finished = trio.Event()

    # The members call

    async def stay(self, member: str) -> None:
        """Register a member (an attempt of a job) for as long as this call lasts.

        An orderly end of the member cancels the call, so it need not unregister. The connection of a killed member
        might come back for a minute, but the member is removed as soon as its job restarts or its machine is lost.
        """
        self._drop(job_of(member))
        self._leaving.discard(job_of(member))
        self._members[member] = None
        try:
            await trio.sleep_forever()
        finally:
            self._members.pop(member, None)
            self._next_round()

    async def exchange(self, member: str, number: int | None, gradient: model.Array | None) -> Round | None:
        """Deliver the part of a round, and wait for the next. None: the member's slice is to leave, or all is done."""
        if member not in self._members:
            return None  # its slice is thought lost
        self._members[member] = waiting = Waiting(number, gradient)
        self._next_round()
        await waiting.over.wait()
        return waiting.answer

    # The driver calls

    async def follow(self, reservation_id: str) -> None:
        """Follow a reservation, to hear of slices that are to leave before they do."""
        reservation = await fray.current_cluster().follow_reservation(reservation_id)
        async for change in reservation.changes():
            if change.kind is ReservationEventKind.SHRINKING:
                self._leaving |= set(change.jobs)
            elif change.kind is ReservationEventKind.LOST:
                self._drop(*change.jobs)
                self._next_round()

    def ran_with(self, members: int, steps: int) -> bool:
        """Return whether the last ``steps`` steps were made by ``members`` members each."""
        return self._sizes[-steps:] == [members] * steps

    async def result(self, steps: int) -> dict[str, object]:
        """Wait for the step of this number; return the weights, the members of each step, and the number of repeats."""
        self._steps = steps
        await self._finished.wait()
        return {"weights": self._weights, "sizes": self._sizes, "redone": self._redone}

    # Rounds

    def _drop(self, *jobs: str) -> None:
        for member in [member for member in self._members if job_of(member) in jobs]:
            del self._members[member]

    def _next_round(self) -> None:
        here = {member: waiting for member, waiting in self._members.items() if waiting is not None}
        if not here or len(here) < len(self._members):
            return
        self._close_round(here)
        staying = [] if self._finished.is_set() else [member for member in here if job_of(member) not in self._leaving]
        self._number += 1
        self._world = tuple(staying)
        for member, waiting in here.items():
            self._members[member] = None
            if member in staying:
                rank, size = staying.index(member), len(staying)
                doomed = self._kill_one and self._number > KILL_AFTER and (rank, size > 1) == (0, True)
                self._kill_one = self._kill_one and not doomed
                waiting.answer = Round(self._number, len(self._sizes), rank, size, self._weights, doomed)
            waiting.over.set()

    def _close_round(self, here: dict[str, Waiting]) -> None:
        if not self._world:
            return
        parts = [here[member] for member in self._world if member in here and here[member].number == self._number]
        if len(parts) < len(self._world):
            self._redone += 1
            return
        self._weights = model.stepped(self._weights, [part.gradient for part in parts if part.gradient is not None])
        self._sizes.append(len(parts))
        if self._steps is not None and len(self._sizes) >= self._steps:
            self._finished.set()


def job_of(attempt: str) -> str:
    return attempt.partition(":")[0]
