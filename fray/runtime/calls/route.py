"""The way to one actor, whichever incarnation of it lives.

The law. A call belongs to a `Route` (one actor). While the route knows no living incarnation the call waits there.
Once it does, the call belongs to a `Binding` (this actor on that host) in the table of a `Peer` (that host): queued
while there is no connection, open once it was sent. Whatever ends a binding (the host's process is gone, the directory
names another incarnation, the host says that it has no such actor) hands each of its calls to `calls.fate`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import trio
from attrs import evolve

from fray.errors import ChannelFull, FrayError, NoSuchActor
from fray.model.messages.client import ActorEndpoint, Names
from fray.model.specs import EndReason, Outcome
from fray.net.codec import Bytes
from fray.runtime.calls.call_future import CallFuture
from fray.runtime.calls.host_connection import HostConnection
from fray.runtime.calls.range_set import ENDED_HERE, RAISED
from fray.runtime.calls.wire import (
    OPEN_BYTES_LIMIT,
    OPEN_CALLS_LIMIT,
    HostLoss,
    LossAction,
    on_host_lost,
)
from fray.runtime.serialization import errors
from fray.runtime.serialization.buffers import PRIVATE, TransferCapabilities

if TYPE_CHECKING:
    from fray.runtime.calls.caller import Caller

WORD_WAIT_S = 1.0
"""How long calls of a lost host wait for the directory to say why it is gone."""
GONE_LIMIT = 100
"""So many of an actor's dead incarnations are remembered: the directory may still name one, never an old one."""
PROOF_WAIT_S = 2.0
"""How long calls wait for the channel itself to notice what the directory has said."""


class NameDirectory(Protocol):
    """Who is where; `fray.runtime.controller_client.names.NameSubscriptions` is one."""

    def watch(self, key: str, on_names: Callable[[Names, Sequence[Bytes]], None]) -> Callable[[], None]:
        """Call back at once with what is known, then at each change; returns what ends the watch."""


class RouteBinding:
    """One actor on one host: what a route uses until it learns of another."""

    __slots__ = ("peer", "route", "target")

    def __init__(self, route: Route, peer: HostConnection, target: int) -> None:
        self.route = route
        self.peer = peer
        self.target = target


class Route:
    """The way to one actor. ``key`` is its directory key; None for an endpoint that never moves."""

    def __init__(self, caller: Caller, label: str, key: str | None = None, number: int = 0) -> None:
        self.number = number
        """Of a light actor on the host that ``key`` means; 0 for others."""
        self.caller = caller
        self.label = label
        self.key = key
        self.endpoint: ActorEndpoint | None = None
        self.binding: RouteBinding | None = None
        self.end: HostLoss | None = None
        """Set once the actor will never be there again; with `may_return`, while its machine is silent."""
        self.may_return = False
        self.on_end: list[Callable[[], object]] = []
        """Called when the actor of a route that never moves is gone."""
        self.word = trio.Event()
        """Set, and replaced, whenever the directory says something new."""
        self._waiting: deque[CallFuture] = deque()
        self._waiting_bytes = 0
        self._gone: dict[tuple[str, int], None] = {}
        """The last `GONE_LIMIT` incarnations that are proven dead, or denied the actor, in order."""
        self._unwatch: Callable[[], None] | None = None

    def __repr__(self) -> str:
        where = self.end.text if self.end else repr(self.binding.peer) if self.binding else "not there yet"
        return f"<Route to {self.label}: {where}, {len(self._waiting)} calls wait>"

    @property
    def is_connected(self) -> bool:
        return self.binding is not None and self.binding.peer.connected

    @property
    def is_full(self) -> bool:
        binding = self.binding
        return binding is not None and binding.peer.is_full

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(self, call: CallFuture) -> None:
        """Send the call, or let it wait for an incarnation, or fail it."""
        binding = self.binding
        if binding is not None:
            call.binding = binding
            binding.peer.send(call)
        elif self.end is not None:
            self._undelivered(call, self.end.undelivered(self.label))
        elif self.endpoint is not None and self._is_new(self.endpoint):
            self._bind(self.endpoint)
            self.dispatch(call)
        else:
            self._wait(call)

    def check_room(self) -> None:
        binding = self.binding
        full = binding.peer.table.is_full if binding is not None else len(self._waiting) >= OPEN_CALLS_LIMIT
        if full or self._waiting_bytes > OPEN_BYTES_LIMIT:
            raise ChannelFull(
                f"{OPEN_CALLS_LIMIT} calls or {OPEN_BYTES_LIMIT} bytes of arguments are unanswered by {self.label}: "
                "await some before making more",
                actor=self.label,
            )

    @property
    def terms(self) -> TransferCapabilities:
        """What is known of the host that matters for large buffers."""
        return PRIVATE if self.binding is None else self.binding.peer.exchange.terms

    async def wait_room(self) -> None:
        """Back-pressure: wait until the peer takes more."""
        while self.is_full and self.binding is not None:
            await self.binding.peer.wait_room()

    async def wait_bound(self) -> RouteBinding:
        """Wait for an incarnation. Raises: why there will never be one."""
        while self.binding is None:
            if self.end is not None:
                raise self.end.undelivered(self.label)
            if self.endpoint is not None and self._is_new(self.endpoint):
                self._bind(self.endpoint)
            else:
                await self.word.wait()
        return self.binding

    def cancel(self, call: CallFuture) -> None:
        if call.binding is not None:
            call.binding.peer.cancel(call)
        elif call in self._waiting:
            self._waiting.remove(call)
            self._waiting_bytes -= call.size
            call.answer_cancelled()

    def _wait(self, call: CallFuture) -> None:
        call.binding = None
        self._waiting.append(call)
        self._waiting_bytes += call.size

    def _release_waiting(self) -> None:
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for call in waiting:
            self.dispatch(call)

    # What the directory says -----------------------------------------------------------------------------------------

    def follow(self, directory: NameDirectory) -> None:
        assert self.key is not None
        self._unwatch = directory.watch(self.key, self._on_names)
        if self.end is not None:
            self.close()

    def _on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        if self.end is not None and not self.may_return:
            return
        if names.ended is not None:
            self._end(names.ended, blobs, names.may_return)
        else:
            self.end = None
            self._move(names.endpoints)
        word, self.word = self.word, trio.Event()
        word.set()

    def _end(self, outcome: Outcome, blobs: Sequence[Bytes], may_return: bool) -> None:
        """For good; or (``may_return``) until the directory names an incarnation again: calls fail meanwhile."""
        self.endpoint, self.may_return = None, may_return
        self.end = why_ended(outcome, blobs)
        self._unbind(self.end, PROOF_WAIT_S)
        self._release_waiting()
        if not may_return:
            self.close()

    def _move(self, endpoints: Sequence[ActorEndpoint]) -> None:
        if self.number:
            endpoints = [evolve(endpoint, number=self.number) for endpoint in endpoints]
        living = [endpoint for endpoint in endpoints if self._is_new(endpoint)]
        self.endpoint = living[-1] if living else None
        if self.endpoint is None:
            self._unbind(HostLoss(text="it is not registered any more"), None)
        elif self.binding is None or not self.binding.peer.serves(self.endpoint, self.binding.target):
            self._unbind(HostLoss(text="its process was replaced by another"), PROOF_WAIT_S)
            self._bind(self.endpoint)

    def _is_new(self, endpoint: ActorEndpoint) -> bool:
        return (endpoint.incarnation, endpoint.number) not in self._gone

    def _bind(self, endpoint: ActorEndpoint) -> None:
        self.endpoint = endpoint
        peer = self.caller.peer(endpoint, keyed=self.key is not None)
        self.binding = RouteBinding(self, peer, endpoint.number)
        peer.bindings[self.binding] = None
        self._release_waiting()

    def _unbind(self, end: HostLoss, proof_wait_s: float | None) -> None:
        """The directory's word. Only a channel that is down, or stays up too long, lets it end what is under way:
        answers may still be on their way (``proof_wait_s=None``: the process may well live on and answer)."""
        binding, self.binding = self.binding, None
        if binding is not None:
            self.caller.spawn(self._bury, binding, end, binding.peer.down, proof_wait_s)

    # What becomes of calls whose host is gone -------------------------------------------------------------------------

    def peer_ended(self, binding: RouteBinding, error: FrayError, is_proof: bool) -> None:
        """The channel of ``binding`` has ended."""
        if self.binding is binding:
            self.binding = None
        gone = HostLoss(text=f"its process is gone ({error})", cause=error)
        end = gone if is_proof else HostLoss(text=str(error), trouble=error)
        if is_proof and self.key is None:
            self._is_gone(end)
        if is_proof:
            self._bury_name(binding)
        wait_s = WORD_WAIT_S if is_proof and self.key is not None and self.end is None else 0.0
        self.caller.spawn(self._bury, binding, end, self.word, wait_s)

    def refused(self, call: CallFuture, error: BaseException) -> None:
        """The host says that it has no such actor (any more) and has not run the call."""
        binding = call.binding
        if self.number and (isinstance(error, NoSuchActor) or ENDED_HERE in getattr(error, "details", {})):
            raised = getattr(error, "details", {}).get(RAISED)
            end = None if raised is None else failed_with(raised, str(error), constructing=True)
            # its host lives, and says that it will not be there
            self._undelivered(call, error if end is None else end.undelivered(self.label))
            return
        if binding is None or self.key is None:
            self._is_gone(HostLoss(text=str(error)))
            self._undelivered(call, error)
            return
        self._bury_name(binding)
        if self.binding is binding:
            self.binding = None
            self.caller.spawn(self._bury, binding, HostLoss(text=str(error)), binding.peer.down, None)
        self.dispatch(call)

    def _bury_name(self, binding: RouteBinding) -> None:
        self._gone[binding.peer.incarnation, binding.target] = None
        while len(self._gone) > GONE_LIMIT:
            del self._gone[next(iter(self._gone))]

    async def _bury(self, binding: RouteBinding, end: HostLoss, until: trio.Event, within_s: float | None) -> None:
        peer = binding.peer
        try:
            if peer.has_calls(binding):
                with trio.move_on_after(math.inf if within_s is None else within_s):
                    await until.wait()
                if within_s is None:
                    end = await self._end_of_unregistered(peer, end)
        except trio.Cancelled:  # the caller is closing, and no longer knows the peer that holds these calls
            self._give_up(binding, self.end or end)
            raise
        self._settle(binding, self.end or end)

    def _give_up(self, binding: RouteBinding, end: HostLoss) -> None:
        queued, opened = binding.peer.table.take(lambda call: call.binding is binding)
        for call in opened:
            call.fail(end.delivered(self.label, call.method))
        for call in queued:
            call.fail(end.undelivered(self.label))

    async def _end_of_unregistered(self, peer: HostConnection, end: HostLoss) -> HostLoss:
        """The connection is gone too: the process has ended, or its machine is out of reach."""
        with trio.move_on_after(PROOF_WAIT_S):
            await peer.over.wait()
        if peer.ended is None:
            return HostLoss(text="its machine does not answer and the cluster has given it up", lost=True)
        return HostLoss(text=f"its process is gone ({peer.ended})", cause=peer.ended)

    def _settle(self, binding: RouteBinding, end: HostLoss) -> None:
        queued, opened = binding.peer.table.take(lambda call: call.binding is binding)
        again = [call for call in opened if self._is_repeated(call, binding.peer.heard(call), end)]
        again += [call for call in queued if self._is_repeated(call, False, end)]
        binding.peer.release(binding)
        later, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for call in (*again, *later):
            self.dispatch(call)

    def _is_repeated(self, call: CallFuture, delivered: bool, end: HostLoss) -> bool:
        if call.done():
            return False
        may_come_back = self.key is not None and end.trouble is None and self.end is None and not call.cancelled
        decided = on_host_lost(delivered=delivered, may_come_back=may_come_back, repeats=call.repeats)
        if decided is LossAction.REPEAT:
            call.repeats -= delivered
            call.number = 0
            return True
        if decided is LossAction.DIED:
            self._undelivered(call, end.undelivered(self.label))
        elif call.repeats == 0 or not self._goes_elsewhere(call):
            call.fail(end.delivered(self.label, call.method))
        return False

    def _is_gone(self, end: HostLoss) -> None:
        """Of a route that never moves."""
        if self.end is None:
            self.end = end
            for listener in self.on_end:
                listener()

    def _undelivered(self, call: CallFuture, error: BaseException) -> None:
        """It had surely no effect: whoever made it may know another actor for it."""
        if not self._goes_elsewhere(call):
            call.undelivered = True
            call.fail(error)

    def _goes_elsewhere(self, call: CallFuture) -> bool:
        other = None if call.elsewhere is None or call.cancelled or call.done() else call.elsewhere(call)
        if other is None:
            return False
        call.repeats -= call.number > 0 and call.repeats > 0
        call.number, call.binding, call.route = 0, None, other
        other.dispatch(call)
        return True

    def fail_all(self, error: FrayError) -> None:
        """The caller is closing."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(error)

    def close(self) -> None:
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None


def why_ended(outcome: Outcome, blobs: Sequence[Bytes]) -> HostLoss:
    """What the directory says of an actor's end, its error attached."""
    text = outcome.message or f"it ended ({outcome.cause})"
    if not blobs or outcome.cause is not EndReason.FAILURE:
        return HostLoss(text=text, lost=outcome.cause is EndReason.MACHINE_LOST)
    text = f"its constructor raised {text}" if outcome.constructing else text
    return failed_with(bytes(blobs[0]), text, outcome.constructing)


def failed_with(error: bytes, text: str, constructing: bool) -> HostLoss:
    """The end of an actor that failed with ``error``, by `remote_errors.dump_error`."""
    load = partial(errors.load_error, error)
    return HostLoss(text=text, cause=load(), raised=load if constructing else None)
