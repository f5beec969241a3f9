"""Whether one actor is there: what the directory says of it, kept up to date."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from fray.errors import ActorDied, FrayError
from fray.model.actors import ActorStatus
from fray.model.ids import ActorId, home_of
from fray.model.messages.calls import AskEnd
from fray.model.messages.client import ActorEndpoint, Names
from fray.model.specs import Cause, Outcome
from fray.net.codec import Bytes
from fray.runtime.context import Runtime
from fray.runtime.route import why_ended

ASK_S = 5.0
"""How long the question whether an actor would please end may take to arrive."""
_IN_ORDER = frozenset({Cause.SUCCEEDED, Cause.STOPPED, Cause.OWNER_ENDED})


class Presence:
    """Follows one actor from now on; ``on_change`` is called, in the loop, whenever it comes, goes, or has ended.

    Of a light actor the directory knows the host: it is there when its host is, unless `told_ended`.
    """

    def __init__(self, runtime: Runtime, actor_id: ActorId, on_change: Callable[[], object]) -> None:
        self.actor_id = actor_id
        self.job_id, number = home_of(actor_id)
        self.is_light = bool(number)
        self.endpoint: ActorEndpoint | None = None
        self._number = number
        self._outcome: Outcome | None = None
        self._blobs: Sequence[Bytes] = ()
        self._was_there = False
        self._on_change = on_change
        self._unwatch: Callable[[], None] = lambda: None
        self._unwatch = runtime.link.watch(f"actor:{self.job_id}", self._on_names)
        if self.is_over:
            self.close()

    def _on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        self.endpoint = names.endpoints[-1] if names.endpoints else None
        self._outcome, self._blobs = names.ended, blobs
        self._was_there = self._was_there or self.endpoint is not None
        if self.is_over:
            self.close()  # there is nothing more to hear
        self._on_change()

    def close(self) -> None:
        """Follow it no longer."""
        self._unwatch()

    @property
    def number(self) -> int:
        """Its number on its host."""
        return self._number or (self.endpoint.number if self.endpoint is not None else 0)

    @property
    def incarnation(self) -> str:
        """Of the one that is there; empty when none is."""
        return self.endpoint.incarnation if self.endpoint is not None else ""

    @property
    def is_ready(self) -> bool:
        return self.endpoint is not None

    @property
    def is_over(self) -> bool:
        """It will never be there (again)."""
        return self._outcome is not None

    @property
    def status(self) -> ActorStatus:
        if self._outcome is not None:
            return ActorStatus.ENDED if self._outcome.cause in _IN_ORDER else ActorStatus.FAILED
        if self.endpoint is not None:
            return ActorStatus.READY
        return ActorStatus.RESTARTING if self._was_there else ActorStatus.CREATING

    @property
    def why(self) -> str:
        """How it ended."""
        return "" if self._outcome is None else why_ended(self._outcome, self._blobs).text

    def error(self, label: object) -> FrayError:
        """The end of an actor that is over, as an error."""
        if self._outcome is None:
            return ActorDied(f"{label} has gone")
        return why_ended(self._outcome, self._blobs).undelivered(str(label))


async def ask_end(runtime: Runtime, presence: Presence, reason: str) -> None:
    """Ask an actor that is there to end in order; one that is not there, or does not answer, is left as it is."""
    if presence.endpoint is None:
        return
    with trio.move_on_after(ASK_S):
        peer = runtime.caller.peer(presence.endpoint, keyed=True)
        try:
            await peer.request(AskEnd(number=presence.number, reason=reason))
        except FrayError:
            pass  # it is going, or gone: whoever asks waits for its end
