"""One call at its host: its arguments, its way to an answer, and what its method may know of it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol

import trio

from fray.errors import DeadlineExceeded, FrayError, NotPicklable
from fray.net.buffers.chunks import check_transfer
from fray.net.codec import Bytes, Kind
from fray.runtime.actors.input_stream import BlockingStream, InputBuffer, Stream
from fray.runtime.actors.methods import Method
from fray.runtime.calls.wire import (
    BUFFERS,
    CANCELLED_ANSWER,
    KEYWORDS,
    NOT_RUN,
    Answer,
)
from fray.runtime.current_call import current_actor_var
from fray.runtime.deadlock import actor_of
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffers import PickledObject, TransferCapabilities, detach_buffers

if TYPE_CHECKING:
    from fray.runtime.actors.async_actor import ConcurrencyGroup
    from fray.runtime.actors.hosted_actor import HostedActor
    from fray.runtime.actors.lifecycle import ActorLifecycle
    from fray.runtime.actors.output_stream import OutputStream
    from fray.runtime.serialization.buffer_transfer import IncomingTransfer

INTERNAL_CALL = -1
"""The number of a call that counts for nobody: a question of the process itself."""
_RESULT, _FAULT = int(Kind.RESULT), int(Kind.FAULT)


class CallOrigin(Protocol):
    """Whoever made a call and gets its answer."""

    def answer(self, call: IncomingCall, answer: Answer) -> None: ...

    def deliver(self, target: int, call: IncomingCall) -> None: ...

    def send_item(self, call: IncomingCall, data: Any) -> None: ...

    @property
    def capabilities(self) -> TransferCapabilities: ...

    def grant_credit(self, call: IncomingCall, items: int) -> None: ...

    async def wait_room(self) -> None: ...


class IncomingCall:
    """One call under way at its host; also what `fray.current_actor` shows to the method."""

    __slots__ = (
        "_waits",
        "actor",
        "arrival",
        "arrived_at",
        "body",
        "cancelled",
        "deadline",
        "fatal",
        "flags",
        "origin",
        "inputs",
        "lane",
        "links",
        "method",
        "number",
        "outcome",
        "scope",
        "spec",
        "stream",
        "talk",
        "told",
    )

    def __init__(self, guest: CallOrigin, number: int, flags: int, method: str, body: Bytes) -> None:
        self.origin = guest
        self.number = number
        self.flags = flags
        self.method = method
        self.body = body
        self.transfer: IncomingTransfer | None = None
        """The buffers outside its pickle, if it has any."""
        self.deadline: float | None = None
        self.links: tuple[str, ...] = ()
        self._waits: set[Any] | None = None
        self.cancel_event: threading.Event | None = None
        self.cancelled = False
        self.actor: HostedActor | None = None
        self.arrived_at = 0.0
        self.lane: ConcurrencyGroup | None = None
        self.spec: Method | None = None
        self.scope: trio.CancelScope | None = None
        self.stream: OutputStream | None = None
        self.inputs: InputBuffer | None = None
        """What the caller sends, of a call that is flagged TWO_WAY."""
        self.method_stream: Stream | BlockingStream | None = None
        """The method's end of such a conversation."""
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
        """It runs, as far as the loop knows."""
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
        return [getattr(future, "mark", "") for future in tuple(self._waits or ())]

    def wait_cancelled(self, timeout_s: float | None = None) -> bool:
        """On a thread: wait until the caller no longer waits; False after ``timeout_s``."""
        if trio.lowlevel.in_trio_run():
            raise FrayError("wait_cancelled() is for methods on threads: an async method is cancelled where it awaits")
        if self.cancel_event is None:
            self.cancel_event = threading.Event()
        return self.cancelled or self.cancel_event.wait(timeout_s)

    def mark_cancelled(self) -> None:
        """The caller no longer waits."""
        self.cancelled = True
        if self.cancel_event is not None:
            self.cancel_event.set()

    # Running it ------------------------------------------------------------------------------------------------------

    def unpickle_arguments(self) -> tuple[Any, Any]:
        """The unpickled arguments, the context in front where the method wants it."""
        assert self.spec is not None
        assert self.actor is not None
        if self.transfer is None:
            args, kwargs = pickling.loads_call(self.body, bool(self.flags & KEYWORDS))
        else:
            pickled, buffers = self.transfer.opened(self.body)
            args, kwargs = pickling.loads_call(pickled, bool(self.flags & KEYWORDS), buffers)
        self.body = b""
        if self.spec.wants_context:
            args = (self.actor.make_context(self), *args)
        if self.method_stream is not None:
            place = self.spec.stream_position
            if place <= len(args):
                args = (*args[:place], self.method_stream, *args[place:])
            else:
                kwargs = {**kwargs, self.spec.stream_parameter: self.method_stream}
        return args, kwargs

    def invoke(self) -> Any:
        """Run a sync method."""
        current_actor_var.set(self)
        args, kwargs = self.unpickle_arguments()
        assert self.spec is not None
        return self.spec.function(*args, **kwargs)

    def result_answer(self, value: Any) -> Answer:
        """The answer that carries ``value``, or says why it cannot travel."""
        if type(value) is PickledObject:  # packed and settled by Fray itself
            return _RESULT, BUFFERS, value
        try:
            packed = pickling.pack(value)
        except NotPicklable:  # once more, to say of what: the words cost more than most results
            packed = pickling.pack(value, f"the result of {self.name}.{self.method}()")
        if type(packed) is bytes:
            return _RESULT, 0, packed
        del value  # whatever nobody else holds need not be copied
        return _RESULT, BUFFERS, self.detach(packed, "result")

    def detach(self, packed: Any, what: str) -> Any:
        """A parcel on its way out, independent of the objects it was made of."""
        check_transfer(packed.bulk_bytes, f"a {what} of {self.name}.{self.method}()")
        detach_buffers(packed, self.origin.capabilities)
        return packed

    def error_answer(self, error: BaseException) -> Answer:
        """The answer that carries an error."""
        if not isinstance(error, Exception) and not isinstance(error, BaseExceptionGroup):
            self.fatal = error
        return _FAULT, 0, errors.dump_error(error)

    def finish(self, answer: Answer) -> None:
        """Answer the caller, once; later answers are dropped."""
        self.origin.answer(self, answer)

    def refuse(self, error: FrayError) -> None:
        """Answer that it has not been run and will not be."""
        self.origin.answer(self, (_FAULT, NOT_RUN, errors.dump_error(error)))

    def is_past_deadline(self) -> bool:
        return self.deadline is not None and trio.current_time() >= self.deadline

    def deadline_error(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"{self.name}.{self.method}() did not end before its deadline", method=self.method)

    # As a job of an executor -----------------------------------------------------------------------------------------

    def run(self) -> None:
        """On the actor's thread."""
        assert self.actor is not None
        if not self.actor.claim(self):
            return
        self.actor.context.copy().run(self._run)

    def _run(self) -> None:
        try:
            value = [self.invoke()]
            if isinstance(self.method_stream, BlockingStream) and self.spec is not None and self.spec.is_generator:
                value = [self.method_stream.produce(value[0])]
            self.outcome = self.result_answer(value.pop())  # which lets go of it when it has been pickled
        except BaseException as error:
            self.outcome = self.error_answer(error)
            if isinstance(error, KeyboardInterrupt):
                raise

    def done(self) -> None:
        """In the loop."""
        assert self.actor is not None
        if isinstance(self.method_stream, BlockingStream):
            self.method_stream.flush()
        self.actor.on_call_ended(self, self.outcome or CANCELLED_ANSWER)
