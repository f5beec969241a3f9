"""Incoming call as its host sees it: arguments, answer, and the items it exchanges with its caller.

`IncomingCall` refers to its caller and its actor by the protocols `CallOrigin` and `ServingActor` only, so that the
actors, their streams and the sessions of callers can build on it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import TYPE_CHECKING, Any, Protocol

import trio

from fray.errors import DeadlineExceeded, FrayError, NotPicklable, ProtocolMismatch
from fray.model.messages.large_values import check_size
from fray.net.codec import Bytes, Kind
from fray.runtime.actors.methods import Method
from fray.runtime.calls.dedup import Answer
from fray.runtime.calls.flow_control import (
    COUNT_BYTES,
    WINDOW,
    WINDOW_MOST,
    ReceiveWindow,
    SendWindow,
    unpack_count,
    unpack_growth,
)
from fray.runtime.calls.wire import BUFFERS, END, INTERRUPTED, KEYWORDS, NOT_RUN
from fray.runtime.current_call import current_actor_var
from fray.runtime.deadlock import actor_of
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffers import PickledObject, TransferCapabilities, detach_buffers

if TYPE_CHECKING:
    from fray.runtime.actors.lifecycle import ActorLifecycle
    from fray.runtime.serialization.buffers import IncomingTransfer
    from fray.runtime.tracing_sdk import ServedCall

# Callers number their calls from 1.
INTERNAL_CALL = -1
"""Number of a call that the process makes to its own actor; it does not count as use of the actor."""
# A caller that takes items as fast as they are made would otherwise keep the generator running without a checkpoint.
TURN_ITEMS = 64
"""Items that a generator in the loop yields before other tasks get a turn."""
_RESULT, _FAULT = int(Kind.RESULT), int(Kind.FAULT)


class CallOrigin(Protocol):
    """The maker of a call, which receives its answer: a `CallerSession`, or this process itself."""

    @property
    def capabilities(self) -> TransferCapabilities:
        """Ways in which large buffers can be sent to the caller."""

    def answer(self, call: IncomingCall, answer: Answer) -> None:
        """Send the answer, unless the call has been answered."""

    def deliver(self, target: int, call: IncomingCall) -> None:
        """Pass the call to the actor with the number ``target`` (again: it had no actor when it arrived)."""

    def send_item(self, call: IncomingCall, data: Any) -> None:
        """Send one item of a stream."""

    def grant_credit(self, call: IncomingCall, items: int) -> None:
        """Allow the caller to send ``items`` more items."""

    async def wait_room(self) -> None:
        """Wait until the channel has room (back-pressure of streams)."""


class ServingActor(Protocol):
    """Part of an actor that its calls use."""

    actor_id: str
    name: str
    context: Context
    make_context: Callable[[IncomingCall], Any]

    @property
    def lifecycle(self) -> ActorLifecycle | None: ...

    def cancel(self, call: IncomingCall) -> None: ...

    def is_running(self, call: IncomingCall) -> bool: ...

    def run_on_thread(self, call: IncomingCall) -> None: ...

    def on_thread_done(self, call: IncomingCall) -> None: ...


class IncomingCall:
    """Call under way at its host; also what `fray.current_actor` shows to the method.

    It is its own work item of an executor (`run`, `done`), because a call that had to make one would be slower.
    """

    trace: ServedCall | None = None
    """Span of the call, if its caller has one: of a `TracedCall`."""
    # One object for each call, on the hot path.
    __slots__ = (
        "_waits",
        "actor",
        "arrived_at",
        "body",
        "cancel_event",
        "cancelled",
        "deadline",
        "fatal",
        "flags",
        "inputs",
        "links",
        "method",
        "method_stream",
        "number",
        "origin",
        "outcome",
        "scope",
        "spec",
        "stream",
        "transfer",
    )

    def __init__(self, origin: CallOrigin, number: int, flags: int, method: str, body: Bytes) -> None:
        self.origin = origin
        self.number = number
        self.flags = flags
        self.method = method
        self.body = body
        self.transfer: IncomingTransfer | None = None
        """Out-of-band buffers of the arguments, if there are any."""
        self.deadline: float | None = None
        self.links: tuple[str, ...] = ()
        # Made on first use, as are `cancel_event` and the streams: most calls need none of them.
        self._waits: set[Any] | None = None
        self.cancel_event: threading.Event | None = None
        self.cancelled = False
        self.actor: ServingActor | None = None
        self.arrived_at = 0.0
        self.spec: Method | None = None
        self.scope: trio.CancelScope | None = None
        self.stream: OutputStream | None = None
        self.inputs: InputBuffer | None = None
        """Items from the caller, for a call flagged TWO_WAY."""
        self.method_stream: Any = None
        """The method's end of a two-way call: a `Stream` or `BlockingStream`."""
        self.outcome: Answer | None = None
        self.fatal: BaseException | None = None
        """SystemExit or KeyboardInterrupt that the method raised."""

    def __repr__(self) -> str:
        return f"<call {self.number} of {self.name}.{self.method}()>"

    @property
    def actor_id(self) -> str:
        return self.actor.actor_id if self.actor is not None else ""

    @property
    def name(self) -> str:
        return self.actor.name if self.actor is not None else ""

    @property
    def lifecycle(self) -> ActorLifecycle | None:
        return self.actor.lifecycle if self.actor is not None else None

    @property
    def has_begun(self) -> bool:
        """Flag: it runs, as far as the loop can tell."""
        return self.actor is not None and self.actor.is_running(self)

    @property
    def chain(self) -> tuple[str, ...]:
        return tuple(actor_of(link) for link in self.links)

    @property
    def waits(self) -> set[Any]:
        if self._waits is None:
            self._waits = set()
        return self._waits

    @property
    def awaited(self) -> list[str]:
        """Marks of the calls that its code waits for."""
        # A copy: a thread of the actor may change the set while the loop reads it.
        return [getattr(future, "mark", "") for future in tuple(self._waits or ())]

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """Wait, on a thread, until the call is cancelled.

        Returns:
            False after ``timeout_s`` (default: no limit).

        Raises:
            FrayError: called in the loop.
        """
        # A wait here would stop the loop, and with it the frame that cancels the call.
        if trio.lowlevel.in_trio_run():
            raise FrayError("wait_cancelled() is for methods on threads: an async method is cancelled where it awaits")
        if self.cancel_event is None:
            self.cancel_event = threading.Event()
        # Checked after the event was made: `mark_cancelled` sets the flag first, so one of the two is always seen.
        return self.cancelled or self.cancel_event.wait(timeout_s)

    def mark_cancelled(self) -> None:
        """Record that the caller no longer waits, and wake `wait_cancelled`."""
        self.cancelled = True
        if self.cancel_event is not None:
            self.cancel_event.set()

    # Execution -------------------------------------------------------------------------------------------------------

    def unpickle_arguments(self) -> tuple[Any, Any]:
        """Return positional and keyword arguments, with the context first if the method wants it."""
        assert self.spec is not None
        assert self.actor is not None
        if self.transfer is None:
            args, kwargs = pickling.loads_call(self.body, bool(self.flags & KEYWORDS))
        else:
            pickled, buffers = self.transfer.take(self.body)
            args, kwargs = pickling.loads_call(pickled, bool(self.flags & KEYWORDS), buffers)
        # The call object stays until it is answered; its pickled arguments need not.
        self.body = b""
        if self.spec.wants_context:
            args = (self.actor.make_context(self), *args)
        if self.method_stream is not None:
            # By position where that is reached, so that the method's own parameters may follow; else by keyword.
            position = self.spec.stream_position
            if position <= len(args):
                args = (*args[:position], self.method_stream, *args[position:])
            else:
                kwargs = {**kwargs, self.spec.stream_parameter: self.method_stream}
        return args, kwargs

    def enter(self) -> None:
        """Make this call, and its span, those of the running context."""
        # Not reset: each call runs in a context copy of its own.
        current_actor_var.set(self)

    def invoke(self) -> Any:
        """Call the method and return what it returns: a value, a coroutine or a generator."""
        current_actor_var.set(self)  # as `enter`
        args, kwargs = self.unpickle_arguments()
        assert self.spec is not None
        return self.spec.function(*args, **kwargs)

    def result_answer(self, value: Any) -> Answer:
        """Return the answer that carries ``value``.

        Raises:
            NotPicklable, MessageTooLarge: it cannot be sent.
        """
        if type(value) is PickledObject:  # packed and detached by Fray itself
            return _RESULT, BUFFERS, value
        try:
            packed = pickling.pack(value)
        # Pickled a second time only on the way to an error.
        except NotPicklable:  # again, with the name of the call: formatting it costs more than most results
            packed = pickling.pack(value, f"the result of {self.name}.{self.method}()")
        if type(packed) is bytes:
            return _RESULT, 0, packed
        del value  # buffers with no other reference need not be copied
        return _RESULT, BUFFERS, self.detach(packed, "result")

    def detach(self, packed: Any, what: str) -> Any:
        """Make an outgoing pickled object independent of the objects it was made from, and return it.

        A result is a snapshot: what the method changes later must not show in it. Buffers that nothing else refers to
        (by their reference count) are not copied; a count that is too high costs a copy, never correctness.
        """
        check_size(packed.bulk_bytes, f"a {what} of {self.name}.{self.method}()")
        detach_buffers(packed, self.origin.capabilities)
        return packed

    def error_answer(self, error: BaseException) -> Answer:
        """Return the answer that carries an error."""
        # SystemExit and KeyboardInterrupt are answers to the caller and also end the actor, once the answer is out.
        if not isinstance(error, Exception) and not isinstance(error, BaseExceptionGroup):
            self.fatal = error
        return _FAULT, 0, errors.dump_error(error)

    def finish(self, answer: Answer) -> None:
        """Answer the caller, once; later answers are dropped."""
        # The origin drops all answers but the first: end, cancellation and deadline may race.
        self.origin.answer(self, answer)

    def refuse(self, error: FrayError) -> None:
        """Answer that the call has not been run and will not be."""
        self.origin.answer(self, (_FAULT, NOT_RUN, errors.dump_error(error)))

    def interrupted_answer(self, error: BaseException) -> Answer:
        """Return the answer to a call that ends with its actor; a repeatable one goes to the next incarnation."""
        return _FAULT, INTERRUPTED, errors.dump_error(error)

    def is_past_deadline(self) -> bool:
        return self.deadline is not None and trio.current_time() >= self.deadline

    def deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.name}.{self.method}() did not end before its deadline", method=self.method)

    # As a work item of an executor -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Run on the actor's thread."""
        assert self.actor is not None
        self.actor.run_on_thread(self)

    def done(self) -> None:
        """Finish in the loop."""
        assert self.actor is not None
        self.actor.on_thread_done(self)


class TracedCall(IncomingCall):
    """Call of a caller that records spans, in a process that does, too."""

    # A class of its own, so that other calls are as fast as without traces.
    __slots__ = ("trace",)

    def __init__(
        self, origin: CallOrigin, number: int, flags: int, method: str, body: Bytes, trace: ServedCall
    ) -> None:
        super().__init__(origin, number, flags, method, body)
        self.trace: ServedCall = trace

    def enter(self) -> None:
        super().enter()
        self.trace.enter(self.name, self.actor_id, self.method)

    def invoke(self) -> Any:
        self.enter()
        return super().invoke()

    def error_answer(self, error: BaseException) -> Answer:
        self.trace.fail(error)
        return super().error_answer(error)


class InputBuffer:
    """Items that have arrived from the caller and were not yet taken. Used in the loop; `pop` also on a thread."""

    def __init__(self, call: IncomingCall) -> None:
        self.call = call
        # A deque: the loop appends while a thread pops, and both operations are atomic.
        self.items: deque[Bytes] = deque()
        self.ended = False
        """The caller has finished sending."""
        self.on_change: Callable[[], object] = lambda: None
        self.window = ReceiveWindow()

    def on_item(self, flags: int, body: Bytes) -> None:
        """Add the next item, or note the end of all."""
        if flags & END:
            self.ended = True
        # The window makes this impossible for a correct caller; a faulty one must not fill the memory of the host.
        elif len(self.items) < WINDOW:
            self.items.append(body)
        else:
            call = self.call
            text = f"the caller of {call.name}.{call.method}() has sent more than {WINDOW} items that were not received"
            # The error first: the cancellation that follows is acknowledged by a call that has been answered.
            call.finish(call.error_answer(ProtocolMismatch(text)))
            if call.actor is not None:
                call.actor.cancel(call)
        self.on_change()

    def pop(self) -> tuple[Any, int]:
        """Return the next item, and how many items to grant to the caller."""
        body = self.items.popleft()
        try:
            return pickling.loads(body), self.window.took(len(body))
        except Exception as error:
            error.add_note(f"while unpickling an item for {self.call.name}.{self.call.method}()")
            raise


class OutputStream:
    """Outgoing items of one call, sent as far as the caller's credit allows."""

    def __init__(self, call: IncomingCall) -> None:
        self.call = call
        # The first credit comes with the call, so that the first items need no round trip.
        self.window = SendWindow(unpack_count(call.body))
        self.on_credit: Callable[[int], object] = self._on_credit
        call.body = memoryview(call.body)[COUNT_BYTES:]
        self._granted = trio.Event()
        self._sent = 0

    def grant(self, body: Bytes) -> None:
        """Add credit: the caller has taken items."""
        # Before the grant, which continues the sending. From a peer, so it is bounded.
        self.window.credit += min(unpack_growth(body), WINDOW_MOST)
        self.on_credit(unpack_count(body))

    def _on_credit(self, items: int) -> None:
        self.window.on_credit(items)
        self._granted.set()

    def pickle_item(self, item: Any) -> bytes | PickledObject:
        packed = pickling.pack(item, f"an item of {self.call.name}.{self.call.method}()")
        del item
        return packed if type(packed) is bytes else self.call.detach(packed, "item")

    async def put(self, item: Any) -> None:
        """Send one item, when there is credit and the channel has room."""
        while not self.window.is_open:
            self._granted = trio.Event()
            await self._granted.wait()
        # Pickled when there is credit and not before: the item shows its state at the time it is sent.
        self.send(self.pickle_item(item))
        # Credit bounds what one stream has under way; the channel is shared with other calls.
        await self.call.origin.wait_room()
        self._sent += 1
        if self._sent % TURN_ITEMS == 0:
            await trio.lowlevel.checkpoint()

    def send(self, data: bytes | PickledObject) -> None:
        """Use credit and send."""
        self.window.sent(len(data))
        self.transmit(data)

    def transmit(self, data: bytes | PickledObject) -> None:
        """Send an item whose credit has been used already."""
        self.call.origin.send_item(self.call, data)
