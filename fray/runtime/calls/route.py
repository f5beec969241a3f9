"""The way to one actor, whichever incarnation of it lives: sends its calls and decides what a lost host means for them.

Invariants: a call belongs to a `Route` (one actor). While the route has no living incarnation the call waits there.
Once it does, the call belongs to a `RouteBinding` (this actor on that host) in the table of a `HostConnection` (that
host): queued while there is no connection, open once it was sent. Whatever ends a binding (the host's process is gone,
the directory names another incarnation, the host says that it has no such actor) passes each of its calls to
`fray.runtime.calls.host_loss.on_host_lost`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import trio
from attrs import evolve, frozen

from fray.errors import ChannelFull, FrayError, NoSuchActor
from fray.model.messages.calls import GetMetrics
from fray.model.messages.client import ActorEndpoint, Names
from fray.model.messages.large_values import check_size
from fray.model.monitoring.served_calls import ActorMetrics
from fray.net.codec import Bytes
from fray.runtime.calls.flow_control import BufferBudget
from fray.runtime.calls.futures import CallFuture
from fray.runtime.calls.host_connection import HostConnection, RouteBinding
from fray.runtime.calls.host_loss import HostLoss, LossAction, loss_of_error, loss_of_outcome, on_host_lost
from fray.runtime.calls.range_set import ENDED_HERE, RAISED
from fray.runtime.calls.streams import FIRST_CREDIT, CallStream, DuplexStream
from fray.runtime.calls.wire import KEYWORDS, OPEN_BYTES_LIMIT, OPEN_CALLS_LIMIT, call_head
from fray.runtime.current_call import CurrentCall, current_actor_var
from fray.runtime.deadlock import link
from fray.runtime.serialization import pickling
from fray.runtime.serialization.buffers import PRIVATE, PickledObject, TransferCapabilities, detach_buffers

# The connection breaks a moment before the controller hears how the process ended. With the report, errors name the
# exit code or signal instead of a lost connection.
REASON_WAIT_S = 1.0
"""Seconds that calls of a lost host wait for the directory to report why it is gone."""
REASON_WAIT_AWAY_S = 5.0
"""The same while the directory does not answer: after a cut, say, which may have ended this process's session, too."""
LOST_LIMIT = 100
"""Lost incarnations of one actor that are remembered: the directory may still name a recent one, never an old one."""
# Answers that the dead process had sent may still lie in the socket; they are better than OutcomeUnknown.
DIAL_AGAIN_S = 5.0
"""Seconds after which an incarnation counts as lost no longer, if the directory still names it."""
PROOF_WAIT_S = 2.0
"""Seconds that calls wait for the channel itself to notice what the directory has reported."""
REDIAL_WAIT_S = 1.5
"""Seconds that calls wait, after such a report, for a lost connection to be made again: it is dialed once a second, and
callers of a silent machine are to know within 2 s."""


class NameDirectory(Protocol):
    """Source of the endpoints of actors; `fray.runtime.controller_client.names.NameSubscriptions` implements it."""

    @property
    def is_away(self) -> bool:
        """Return whether there is no connection to it, or no answer."""

    def watch(self, key: str, on_names: Callable[[Names, Sequence[Bytes]], None]) -> Callable[[], None]:
        """Call back at once with what is known, then at each change; return the function that ends the watch."""


class RouteOwner(Protocol):
    """Part of a session that routes use (`fray.runtime.calls.caller.Caller`)."""

    @property
    def buffer_budget(self) -> BufferBudget: ...

    @property
    def closed(self) -> FrayError | None:
        """Error of every call once the session has ended."""

    def next_mark(self) -> str:
        """Return a new id for a call made inside another call."""

    def connect(self, endpoint: ActorEndpoint, *, keyed: bool) -> HostConnection: ...

    def spawn(self, task: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None: ...


@frozen
class CallOptions:
    """``timeout_s``: DeadlineExceeded after that long. ``idempotent``: the call may be delivered again and again to
    later incarnations when its host dies. ``retry``: the same, at most so many times."""

    timeout_s: float | None = None
    idempotent: bool = False
    retry: int = 0


DEFAULT_OPTIONS = CallOptions()
_NO_KWARGS: Mapping[str, Any] = {}
_ALWAYS = 1 << 30
S = TypeVar("S", bound=CallStream)


class Route:
    """The way to one actor. ``key`` is its directory key; None for an endpoint that never moves."""

    def __init__(self, owner: RouteOwner, label: str, key: str | None = None, number: int = 0) -> None:
        self.number = number
        """Number of a light actor on the host that ``key`` names; 0 for other actors."""
        self.label = label
        self.key = key
        self.endpoint: ActorEndpoint | None = None
        self.binding: RouteBinding | None = None
        self.loss: HostLoss | None = None
        """Set once the actor is gone for good; or, with `may_return`, while its machine is silent, also from here."""
        self.may_return = False
        self._silence: HostLoss | None = None
        """Set while the directory says that the machine is silent, and the connection of `binding` is not lost."""
        self._watched: RouteBinding | None = None
        """Binding for which `_watch_silence` runs."""
        self.on_lost: list[Callable[[], object]] = []
        """Called when the actor of a route that never moves is gone."""
        self.changed = trio.Event()
        """Set, and replaced, at each report of the directory."""
        self._owner = owner
        self._waiting: deque[CallFuture] = deque()
        self._waiting_bytes = 0
        self._named: Sequence[ActorEndpoint] = ()
        """Endpoints of the last report of the directory."""
        self._lost_incarnations: dict[tuple[str, int], None] = {}
        """The last `LOST_LIMIT` incarnations that are proven dead, or denied the actor, in order."""
        self._settling: dict[RouteBinding, HostLoss] = {}
        """Bindings whose calls wait to be repeated or failed."""
        self._directory: NameDirectory | None = None
        self._unwatch: Callable[[], None] | None = None

    def __repr__(self) -> str:
        where = self.loss.text if self.loss else repr(self.binding.connection) if self.binding else "not there yet"
        return f"<Route to {self.label}: {where}, {len(self._waiting)} calls wait>"

    @property
    def is_gone(self) -> bool:
        """True once the actor is gone for good."""
        return self.loss is not None and not self.may_return

    @property
    def is_connected(self) -> bool:
        return self.binding is not None and self.binding.connection.connected

    @property
    def is_full(self) -> bool:
        """Return whether the host does not keep up with the calls."""
        binding = self.binding
        return binding is not None and binding.connection.is_full

    # Calls -----------------------------------------------------------------------------------------------------------

    async def call(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> Any:
        """Make a call and await its result; wait for room first if the host does not keep up. Raises as `start`."""
        # An awaited call can wait for room; a started one is refused (`start`).
        if self.is_full:
            await self.wait_room()
            self._check_room()
        elif self.binding is None:
            self._check_room()
        body = self._body(method, args, kwargs)
        # Large arguments are shared, not copied: the calling task is suspended until the answer.
        if type(body) is PickledObject:
            await self._prepare_buffers(body)
        call = CallFuture(self, method, body, KEYWORDS if kwargs else 0)
        self.send(call, options, current_actor_var.get())
        return await call.wait()

    def start(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> CallFuture:
        """Make a call now, without a checkpoint; calls on one route start in the order they are made.

        Raises:
            NotPicklable, MessageTooLarge: an argument cannot be sent.
            ChannelFull: too many calls are unanswered; `call` waits instead.
        """
        # Before pickling: the arguments may be large.
        self._check_room()
        call = self.make(method, args, kwargs)
        self.send(call, options, current_actor_var.get())
        return call

    def make(self, method: str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] = _NO_KWARGS) -> CallFuture:
        """Make a call with pickled arguments without sending it. May be called on any thread. Raises as `start`."""
        body = self._detached_body(method, args, kwargs)
        return CallFuture(self, method, body, KEYWORDS if kwargs else 0)

    def stream(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> CallStream:
        """Call a generator method; see `CallStream`. Options to repeat the call have no effect. Raises as `start`."""
        return self._open_stream(CallStream, method, args, kwargs, options)

    def open(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = _NO_KWARGS,
        options: CallOptions = DEFAULT_OPTIONS,
    ) -> DuplexStream:
        """Call a method that takes a stream; see `DuplexStream`. Otherwise as `stream`."""
        return self._open_stream(DuplexStream, method, args, kwargs, options)

    def _open_stream(
        self, kind: type[S], method: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: CallOptions
    ) -> S:
        self._check_room()
        body = self._detached_body(method, args, kwargs, FIRST_CREDIT)
        call = kind(self, method, body, KEYWORDS if kwargs else 0)
        self.send(call, options, current_actor_var.get())
        call.repeats = 0  # items that have been sent cannot be repeated
        return call

    def _body(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], before: bytes = b""
    ) -> bytes | PickledObject:
        """Return the body of the call's frame; a `PickledObject` if arguments have large buffers, which it shares."""
        # Before pickling, which may take long.
        if self._owner.closed is not None:
            raise self._owner.closed
        packed = pickling.pack_call(method, args, kwargs)
        head = call_head(method) + before
        if type(packed) is bytes:
            return head + packed
        assert isinstance(packed, PickledObject)
        check_size(packed.bulk_bytes, f"the call of {self.label}.{method}()")
        packed.pickle = head + packed.pickle
        return packed

    def _detached_body(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], before: bytes = b""
    ) -> bytes | PickledObject:
        """Return `_body` for a call that its maker does not await: the arguments may change before they are sent."""
        body = self._body(method, args, kwargs, before)
        if type(body) is PickledObject:
            # Checked, not awaited: this may run on any thread, and `start` has no checkpoint.
            self._owner.buffer_budget.check(body.bulk_bytes, f"the call of {self.label}.{method}()")
            detach_buffers(body, self.capabilities)
        return body

    async def _prepare_buffers(self, pickled: PickledObject) -> None:
        """Wait for room for large buffers, and copy them into segments while other tasks run."""
        budget = self._owner.buffer_budget
        # Again after each release: other tasks wait for the same room.
        while not budget.has_room(pickled.bulk_bytes):
            await budget.wait_for_room()
        binding = self.binding
        # In steps with checkpoints between them. Otherwise `send` copies all at once and blocks the loop.
        if binding is not None and binding.connection.transfers.can_copy_to_segments(pickled):
            await binding.connection.transfers.copy_to_segments(pickled)

    def send(self, call: CallFuture, options: CallOptions, inside: CurrentCall | None) -> None:
        """Send a call from `make`; ``inside`` is the actor call that it is part of."""
        owner = self._owner
        if owner.closed is not None:
            call.fail(owner.closed)
            return
        if call.pickled is not None:
            # Reserved here and not in `make`: a call that is made on a thread may never be sent.
            owner.buffer_budget.reserve(call.pickled)
        if options is not DEFAULT_OPTIONS:
            call.repeats = _ALWAYS if options.idempotent else options.retry
            if options.timeout_s is not None:
                call.deadline = trio.current_time() + options.timeout_s
        if inside is not None:
            call.mark = owner.next_mark()
            call.chain = (*inside.links, link(inside.actor_id, f"{inside.name}.{inside.method}()", call.mark))
            # Deadlines travel along a chain of calls: work for a caller that has given up is wasted.
            if inside.deadline is not None and (call.deadline is None or inside.deadline < call.deadline):
                call.deadline = inside.deadline
        self.dispatch(call)

    def dispatch(self, call: CallFuture, may_wait: bool = False) -> None:
        """Send the call, let it wait for an incarnation, or fail it.

        ``may_wait``: also while the machine is silent, as every call that may be repeated does.
        """
        binding = self.binding
        if binding is not None:
            call.binding = binding
            binding.connection.send(call)
        # Who allows repetition wants the answer, whichever incarnation gives it. Silence ends: the machine answers
        # again, or is declared lost with its lease.
        elif self.loss is not None and not (self.may_return and (may_wait or call.repeats > 0)):
            self._fail_undelivered(call, self.loss.undelivered(self.label))
        elif self.endpoint is not None and self._is_new(self.endpoint):
            self._bind(self.endpoint)
            self.dispatch(call)
        else:
            # It may have been bound to a lost incarnation; `cancel` looks here to find where it is.
            call.binding = None
            self._waiting.append(call)
            self._waiting_bytes += call.size

    def cancel(self, call: CallFuture) -> None:
        """Cancel a call of this route; see `CallFuture.cancel`."""
        if call.binding is not None:
            call.binding.connection.cancel(call)
        elif call in self._waiting:
            self._waiting.remove(call)
            self._waiting_bytes -= call.size
            call.answer_cancelled()

    def release_buffers(self, pickled: PickledObject) -> None:
        """Give back the budget of a call that has been answered."""
        self._owner.buffer_budget.release(pickled)

    async def metrics(self) -> ActorMetrics:
        """Return the counters of the actor from its process. Raises as a call does."""
        binding = await self.wait_bound()
        answer = await binding.connection.request(GetMetrics(number=binding.target))
        assert isinstance(answer, ActorMetrics)
        return answer

    @property
    def capabilities(self) -> TransferCapabilities:
        """Return the ways in which large buffers can be sent to the host. Any thread."""
        # The future host may be on another machine, so nothing can be placed in shared memory for it yet.
        return PRIVATE if self.binding is None else self.binding.connection.transfers.capabilities

    def _check_room(self) -> None:
        binding = self.binding
        full = binding.connection.table.is_full if binding is not None else len(self._waiting) >= OPEN_CALLS_LIMIT
        if full or self._waiting_bytes > OPEN_BYTES_LIMIT:
            raise ChannelFull(
                f"{OPEN_CALLS_LIMIT} calls or {OPEN_BYTES_LIMIT} bytes of arguments are unanswered by {self.label}: "
                "await some before making more",
                actor=self.label,
            )

    async def wait_room(self) -> None:
        """Apply back-pressure: wait until the host takes more calls."""
        # The binding may be replaced while it waits.
        while self.is_full and self.binding is not None:
            await self.binding.connection.wait_room()

    async def wait_while_silent(self) -> None:
        """Wait until the machine is not silent. Streams fail at once until then: who repeats them has to wait here."""
        await trio.lowlevel.checkpoint()
        while self.loss is not None and self.may_return:
            await self.changed.wait()

    async def wait_bound(self) -> RouteBinding:
        """Wait for an incarnation. Raises why there will never be one."""
        while self.binding is None:
            if self.loss is not None:
                raise self.loss.undelivered(self.label)
            if self.endpoint is not None and self._is_new(self.endpoint):
                self._bind(self.endpoint)
            else:
                await self.changed.wait()
        return self.binding

    def _send_waiting(self, *before: CallFuture, may_wait: bool = False) -> None:
        # Swapped first: `dispatch` appends calls that have to wait again.
        waiting, self._waiting, self._waiting_bytes = self._waiting, deque(), 0
        for call in (*before, *waiting):
            self.dispatch(call, may_wait)

    # Reports of the directory ----------------------------------------------------------------------------------------

    def follow(self, directory: NameDirectory) -> None:
        """Learn from ``directory`` where the actor is."""
        assert self.key is not None
        self._directory = directory
        self._unwatch = directory.watch(self.key, self._on_names)
        # The watch reports at once, within `watch`: then there was no `_unwatch` yet for `_on_ended` to call.
        if self.is_gone:
            self.close()

    def _on_names(self, names: Names, blobs: Sequence[Bytes]) -> None:
        # An end for good is final: a report that was delayed must not revive the actor.
        if self.is_gone:
            return
        if names.ended is not None and names.may_return:
            self._on_silence(loss_of_outcome(names.ended, blobs))
        elif names.ended is not None:
            self._on_ended(loss_of_outcome(names.ended, blobs))
        else:
            # A silent machine has answered again, or the next incarnation is there.
            self.loss = self._silence = None
            self._on_endpoints(names.endpoints)
        # Replaced at each report, so that a waiter sees the next one and not an old one.
        changed, self.changed = self.changed, trio.Event()
        changed.set()

    def _on_silence(self, silence: HostLoss) -> None:
        """Handle a machine that is silent for the controller; it may answer its callers, who are better witnesses."""
        if self.loss is not None:
            self.loss = silence
        elif self.binding is None:
            self._fall_silent(silence)
            # Calls that wait for a first incarnation have not been asked yet whether they may be repeated.
            self._send_waiting()
        else:
            self._silence = silence
            # One task for a binding, however often the controller loses and finds the machine.
            if self._watched is not self.binding:
                self._watched = self.binding
                self._owner.spawn(self._watch_silence, self.binding)

    async def _watch_silence(self, binding: RouteBinding) -> None:
        """Let go of the binding once its connection is lost, if the directory says then that the machine is silent."""
        await self._wait_lost(binding.connection)
        if self._watched is binding:
            self._watched = None
        # Otherwise the machine has returned for the controller, or the binding was replaced.
        if self.binding is binding and self._silence is not None:
            silence = self._silence
            self._drop_binding()
            self._redispatch(binding, silence)

    def _drop_binding(self) -> None:
        """Forget the binding, and with it the witness against a silence that the directory has reported."""
        self.binding = None
        if self._silence is not None:
            self._fall_silent(self._silence)

    def _fall_silent(self, silence: HostLoss) -> None:
        """Fail calls that may not be repeated until the directory names an incarnation again."""
        self.loss, self.may_return, self._silence = silence, True, None
        self.endpoint, self._named = None, ()

    def _on_ended(self, loss: HostLoss) -> None:
        """End for good."""
        self.loss, self.may_return, self._silence = loss, False, None
        self.endpoint, self._named = None, ()
        # Answers first, then the directory's verdict: the report may overtake what the process sent before its end.
        self._release_binding(loss, PROOF_WAIT_S)
        self._send_waiting()
        self.close()

    def _on_endpoints(self, endpoints: Sequence[ActorEndpoint]) -> None:
        # The directory knows the host only; the number selects the light actor within it.
        if self.number:
            endpoints = [evolve(endpoint, number=self.number) for endpoint in endpoints]
        # The directory may still name an incarnation whose death this process has proof of. To dial it again would only
        # delay the calls.
        self._named = endpoints
        self.endpoint = self._living_endpoint()
        if self.endpoint is None:
            # Not proof of a death: a process that unregistered may still be finishing calls.
            self._release_binding(HostLoss(text="it is not registered any more"), None)
        # A report that changes nothing (a repetition after a reset, say) must not disturb the connection.
        elif self.binding is None or not self.binding.connection.serves(self.endpoint, self.binding.target):
            self._release_binding(HostLoss(text="its process was replaced by another"), PROOF_WAIT_S)
            self._bind(self.endpoint)
        else:
            self.move(self.endpoint)

    def move(self, endpoint: ActorEndpoint) -> None:
        """Take over the addresses of a newer ``endpoint`` of the same incarnation: its machine's may have changed."""
        self.endpoint = endpoint
        if self.binding is not None:
            self.binding.connection.move(endpoint)

    def _living_endpoint(self) -> ActorEndpoint | None:
        living = [endpoint for endpoint in self._named if self._is_new(endpoint)]
        return living[-1] if living else None

    def _is_new(self, endpoint: ActorEndpoint) -> bool:
        return (endpoint.incarnation, endpoint.number) not in self._lost_incarnations

    def _bind(self, endpoint: ActorEndpoint) -> None:
        self.endpoint = endpoint
        connection = self._owner.connect(endpoint, keyed=self.key is not None)
        self.binding = RouteBinding(self, connection, endpoint.number)
        connection.bindings[self.binding] = None
        self._send_waiting()

    def _release_binding(self, loss: HostLoss, proof_wait_s: float | None) -> None:
        """Let go of the binding on a report of the directory.

        The report ends what is under way only when the channel is down, or stays up for longer than ``proof_wait_s``:
        answers may still be on their way. With None it never does: the process may well live and answer.
        """
        binding, self.binding = self.binding, None
        if binding is not None:
            # In a task of its own: new calls go to the next incarnation at once, only the old ones wait for the
            # verdict.
            self._owner.spawn(self._settle_lost_calls, binding, loss, binding.connection.disconnected, proof_wait_s)

    # Calls whose host is lost ----------------------------------------------------------------------------------------

    def on_connection_end(self, binding: RouteBinding, error: FrayError, is_proof: bool) -> None:
        """Handle the end of the connection of ``binding``; ``is_proof``: its host is dead, not just out of reach."""
        # The route may have a new binding already, with the old one's calls being settled.
        if self.binding is binding:
            self._drop_binding()
        gone = HostLoss(text=f"its process is gone ({error})", cause=error)
        loss = gone if is_proof else HostLoss(text=str(error), channel_error=error)
        # Without a directory there is no next incarnation: groups and pools learn of the loss from here.
        if is_proof and self.key is None:
            self._mark_lost(loss)
        if is_proof:
            self._remember_lost(binding)
        # Only proof with a directory is worth the wait: otherwise no report about this process will come.
        wait_s = 0.0
        if is_proof and self._directory is not None and self.loss is None:
            wait_s = REASON_WAIT_AWAY_S if self._directory.is_away else REASON_WAIT_S
        self._owner.spawn(self._settle_lost_calls, binding, loss, self.changed, wait_s)

    def on_refused(self, call: CallFuture, error: BaseException) -> None:
        """Handle a host that has no such actor (any longer) and has not run the call."""
        binding = call.binding
        if self.number and (isinstance(error, NoSuchActor) or ENDED_HERE in getattr(error, "details", {})):
            raised = getattr(error, "details", {}).get(RAISED)
            loss = None if raised is None else loss_of_error(raised, str(error), constructing=True)
            # the host lives, and says that this light actor will never be there
            self._fail_undelivered(call, error if loss is None else loss.undelivered(self.label))
            return
        # An endpoint that never moves: the refusal is final for this route.
        if not isinstance(binding, RouteBinding) or self.key is None:
            self._mark_lost(HostLoss(text=str(error)))
            self._fail_undelivered(call, error)
            return
        self._remember_lost(binding)
        if self.binding is binding:
            self._drop_binding()
            # Calls that this host has accepted before may run and answer, so they are left until it disconnects.
            loss = HostLoss(text=str(error))
            self._owner.spawn(self._settle_lost_calls, binding, loss, binding.connection.disconnected, None)
        # The call was not run, so it may go to the next incarnation without being counted as a repetition.
        self.dispatch(call)

    def on_interrupted(self, call: CallFuture, error: BaseException) -> None:
        """Handle a repeatable call that its actor has begun, and answers with ``error`` because it ends."""
        # Sent to the same host: that has closed the actor, and its refusal decides where the call waits, as it does for
        # calls that it had not begun.
        if self._is_repeated(call, True, HostLoss(text=str(error), cause=error)):
            self.dispatch(call, may_wait=True)

    def _remember_lost(self, binding: RouteBinding) -> None:
        self._lost_incarnations[binding.connection.incarnation, binding.target] = None
        # Oldest first. Incarnations of an actor that restarts for ever must not accumulate.
        while len(self._lost_incarnations) > LOST_LIMIT:
            del self._lost_incarnations[next(iter(self._lost_incarnations))]
        if self.key is not None:
            self._owner.spawn(self._dial_again, (binding.connection.incarnation, binding.target))

    async def _dial_again(self, lost: tuple[str, int]) -> None:
        """Dial a lost incarnation again if calls wait and the directory still names it."""
        # What was taken for proof may have come from something between here and there. The directory knows better, and
        # without this, calls would wait for ever for another incarnation.
        await trio.sleep(DIAL_AGAIN_S)
        self._lost_incarnations.pop(lost, None)
        if self.loss is None and self.binding is None:
            self.endpoint = self._living_endpoint()
            if self.endpoint is not None and self._waiting:
                self._bind(self.endpoint)

    async def _settle_lost_calls(
        self, binding: RouteBinding, loss: HostLoss, until: trio.Event, within_s: float | None
    ) -> None:
        """Repeat or fail the calls of a lost binding, after ``until`` or ``within_s`` (None: only ``until``)."""
        connection = binding.connection
        self._settling[binding] = loss
        try:
            # Without open calls there is nothing to decide, and the binding can be released now.
            if connection.has_calls(binding):
                if within_s is None:
                    loss = await self._wait_lost(connection)
                else:
                    with trio.move_on_after(within_s):
                        await until.wait()
        except trio.Cancelled:  # the caller is closing, and has dropped the connection that holds these calls
            self._fail_calls(binding, self.loss or loss)
            raise
        finally:
            self._settling.pop(binding, None)
        # The directory's report, if it has arrived meanwhile, says more than what the connection saw.
        self._redispatch(binding, self.loss or loss)

    def _fail_calls(self, binding: RouteBinding, loss: HostLoss) -> None:
        queued, opened = binding.connection.table.take(lambda call: call.binding is binding)
        for call in opened:
            call.fail(self._owner.closed or loss.delivered(self.label, call.method, call.repeats > 0))
        for call in queued:
            call.fail(self._owner.closed or loss.undelivered(self.label))

    async def _wait_lost(self, connection: HostConnection) -> HostLoss:
        """Wait until the connection is down, too, and return why: the process has ended, or its machine is out of
        reach."""
        while True:
            await connection.disconnected.wait()
            # An unregistered process that has ended refuses the redial soon. Silence means that the machine is out of
            # reach, unless it answers again.
            with trio.move_on_after(REDIAL_WAIT_S):
                await connection.closed.wait()
            if connection.disconnected.is_set():
                break
        if connection.ended is None:
            return HostLoss(
                text="its machine does not answer and was declared lost by the cluster", is_machine_lost=True
            )
        return HostLoss(text=f"its process is gone ({connection.ended})", cause=connection.ended)

    def _redispatch(self, binding: RouteBinding, loss: HostLoss) -> None:
        connection = binding.connection
        queued, opened = connection.table.take(lambda call: call.binding is binding)
        # Sent calls are older than queued ones, and both older than those that wait at the route: calls keep their
        # order.
        again = [call for call in opened if self._is_repeated(call, connection.may_have_received(call), loss)]
        again += [call for call in queued if self._is_repeated(call, False, loss)]
        # The calls were taken first: without a binding the connection may end, and calls left in its table would never
        # be settled.
        connection.release(binding)
        self._send_waiting(*again, may_wait=True)

    def _is_repeated(self, call: CallFuture, delivered: bool, loss: HostLoss) -> bool:
        """Return whether the call is to be sent again; otherwise settle it or pass it to its fallback."""
        # Its deadline may have passed while it waited for the verdict.
        if call.done():
            return False
        # Not after an error of the channel: both processes live, and would disagree again.
        may_come_back = self.key is not None and loss.channel_error is None and not call.cancelled
        may_come_back &= self.loss is None or (self.may_return and call.repeats > 0)
        action = on_host_lost(delivered=delivered, may_come_back=may_come_back, repeats=call.repeats)
        if action is LossAction.REPEAT:
            # Only a possible delivery counts against `retry`; a call that was never sent has not been tried.
            call.repeats -= delivered
            call.number = 0
            return True
        # A pool may have another member for a call that surely had no effect.
        if action is LossAction.DIED:
            self._fail_undelivered(call, loss.undelivered(self.label))
        # One that may have had an effect moves to another member only if its caller allowed repetition.
        elif call.repeats == 0 or not self._use_fallback(call):
            call.fail(loss.delivered(self.label, call.method, call.repeats > 0))
        return False

    def _mark_lost(self, loss: HostLoss) -> None:
        """Record the loss of an actor whose route never moves."""
        if self.loss is None:
            self.loss = loss
            for listener in self.on_lost:
                listener()

    def _fail_undelivered(self, call: CallFuture, error: BaseException) -> None:
        """Fail a call that surely had no effect, unless its maker has another actor for it."""
        if not self._use_fallback(call):
            call.not_delivered = True
            call.fail(error)

    def _use_fallback(self, call: CallFuture) -> bool:
        # A cancelled call must not start again elsewhere.
        other = None if call.fallback is None or call.cancelled or call.done() else call.fallback(call)
        if other is None:
            return False
        call.repeats -= call.number > 0 and call.repeats > 0
        call.number, call.binding, call.route = 0, None, other
        other.dispatch(call)
        return True

    # Closing ---------------------------------------------------------------------------------------------------------

    def fail_all(self, error: FrayError) -> None:
        """Fail the calls that wait here, or to be settled; the caller is closing."""
        waiting, self._waiting = self._waiting, deque()
        for call in waiting:
            call.fail(error)
        # At once: what ends together with the caller may cancel the tasks that await these calls.
        for binding, loss in list(self._settling.items()):
            self._fail_calls(binding, loss)

    def close(self) -> None:
        """Stop following the directory."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None
