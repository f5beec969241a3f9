"""Futures: settled once, awaited by any number of tasks, unpickled when the value is first used.

`FutureBase` is the common part. `CallFuture` is the answer to one actor call. `Future` is settled by the code that made
it: pools, and futures of other processes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Generic, Protocol

import trio
from trio.lowlevel import Abort, Task, current_task, reschedule, wait_task_rescheduled

from fray.errors import ActorDied, CallCancelled, DeadlineExceeded, FrayError, NotPicklable
from fray.net.codec import Kind
from fray.runtime import tracing, waits
from fray.runtime.calls.wire import CANCELLED
from fray.runtime.current_call import current_actor_var
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffer_transfer import OutgoingTransfer
from fray.runtime.serialization.buffers import PickledObject
from fray.type_variables import T_co

CANCEL_WAIT_S = 5.0
"""Seconds that a cancelled caller waits for the callee's acknowledgement."""

# Small integers in this order, so that one comparison tells "settled" and one "needs unpickling" on the hot path.
PENDING, VALUE, ERROR = range(3)
"""States of every future. Higher states belong to one kind of future: settled, but not unpickled yet."""
_PICKLED_VALUE, _PICKLED_ERROR, _LAZY_VALUE = range(ERROR + 1, ERROR + 4)
_FAULT = int(Kind.FAULT)

# A hook, as this module may not import the layer of shared objects above it.
_export: Callable[[Any, str], tuple[Any, ...]] | None = None


def register_export(export: Callable[[Any, str], tuple[Any, ...]]) -> None:
    """Set how futures are pickled: ``export(future, description)`` returns what ``__reduce__`` must.

    `fray.runtime.objects.imported_future` registers itself here, as with `copyreg`: it stands above this module.
    """
    global _export
    _export = export


class FutureBase(Generic[T_co]):
    """State of a future, the tasks that await it, and its callbacks."""

    # A program may hold 100,000 of these (tasks of a pool).
    __slots__ = ("_callbacks", "_state", "_tasks", "_value")

    def __init__(self) -> None:
        self._state = PENDING
        self._value: Any = None
        self._tasks: list[Task] = []
        self._callbacks: list[Callable[[Any], object]] = []

    @property
    def description(self) -> str:
        """Name of the call or task whose result it is, for error messages."""
        raise NotImplementedError

    def cancel(self) -> None:
        """Request the callee to stop; return at once."""
        raise NotImplementedError

    def encoded_outcome(self) -> tuple[bool, pickling.Enclosed]:
        """Return (True, pickled result) or (False, error packed by `dump_error`). The future must be settled."""
        raise NotImplementedError

    def done(self) -> bool:
        """Return whether there is a result or an error."""
        return self._state != PENDING

    @property
    def has_failed(self) -> bool:
        """Return whether there is an error; without unpickling it."""
        return self._state in (ERROR, _PICKLED_ERROR)

    def result(self) -> T_co:
        """Return the result of a future that is `done`; raise what awaiting it raises."""
        # Unpickled here, on the thread that uses the value, and not by the connection: a large pickle would hold up the
        # frames of all other calls.
        if self._state > ERROR:
            self._open()
        if self._state == VALUE:
            return self._value  # type: ignore[no-any-return]  # no variable: this is the path of every call
        if self._state == ERROR:
            raise self._value
        raise FrayError(f"{self!r} has no result yet: await it")

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Call ``callback(self)`` in the loop once the future is settled; at once if it is."""
        # Added after the settlement, it would otherwise never be called.
        if self._state:
            callback(self)
        else:
            self._callbacks.append(callback)

    def remove_done_callback(self, callback: Callable[[Any], object]) -> None:
        """Remove a callback; does nothing if it is not registered."""
        if callback in self._callbacks:
            self._callbacks.remove(callback)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle a reference to this process's future; see `fray.runtime.objects.exports`."""
        if _export is None:
            raise FrayError(f"{self!r} cannot be sent: no cluster here", reason="no cluster")
        return _export(self, self.description)

    def _open(self) -> None:
        """Unpickle the value or error."""
        raise NotImplementedError

    async def _park(self) -> None:
        """Wait for `_wake_tasks`."""
        # Trio's lowest level instead of an Event: an awaited call costs one suspension and no further object.
        task = current_task()
        self._tasks.append(task)

        def abort(_: Any) -> Abort:
            self._tasks.remove(task)
            return Abort.SUCCEEDED

        with waits.waiting():
            await wait_task_rescheduled(abort)

    def _wake_tasks(self) -> None:
        # Swapped first: `_leave` looks at this list to see whether another task still awaits the future.
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            reschedule(task)

    def _wake(self) -> None:
        """Wake all waiting tasks and run the callbacks; the future has been settled."""
        self._wake_tasks()
        # Swapped first: a callback may add or remove others.
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)


def encode_outcome(error: BaseException | None, value: Any, what: str) -> tuple[bool, bytes]:
    """Return (True, pickled ``value``), or (False, error packed by `dump_error`) if there is an error."""
    try:
        return (True, pickling.dumps(value, what)) if error is None else (False, errors.dump_error(error))
    # The reader of the outcome must learn that there is one, even if the value cannot be sent.
    except NotPicklable as problem:
        return False, errors.dump_error(problem)


# Calls ---------------------------------------------------------------------------------------------------------------


class CallConnection(Protocol):
    """Part of a connection that calls use (`fray.runtime.calls.host_connection.HostConnection`)."""

    def cancel(self, call: CallFuture) -> None: ...

    def send_credit(self, call: CallFuture, credit: bytes) -> None: ...

    def send_input(self, call: CallFuture, flags: int, item: bytes) -> None: ...


class CallBinding(Protocol):
    """Actor incarnation that a call was sent to."""

    @property
    def connection(self) -> CallConnection: ...

    @property
    def target(self) -> int: ...


class CallRoute(Protocol):
    """Part of a route that calls use (`fray.runtime.calls.route.Route`)."""

    @property
    def label(self) -> str: ...

    @property
    def is_connected(self) -> bool: ...

    def dispatch(self, call: CallFuture) -> None: ...

    def cancel(self, call: CallFuture) -> None: ...

    def on_refused(self, call: CallFuture, error: BaseException) -> None: ...

    def on_interrupted(self, call: CallFuture, error: BaseException) -> None: ...

    def release_buffers(self, pickled: PickledObject) -> None: ...


class CallFuture(FutureBase[T_co]):
    """The answer to one call; ``await`` it for the result.

    Awaiting raises what the method raised, or the `FrayError` that says why there is no answer. An await that is
    cancelled cancels the call (if no other task awaits it) and waits up to `CANCEL_WAIT_S` for the acknowledgement.
    An answer that is there already is returned without a checkpoint.
    """

    __slots__ = (
        "binding",
        "body",
        "cancelled",
        "chain",
        "deadline",
        "fallback",
        "flags",
        "mark",
        "method",
        "not_delivered",
        "number",
        "pickled",
        "repeats",
        "route",
        "size",
        "trace",
        "transfer",
    )

    def __init__(self, route: CallRoute, method: str, body: bytes | PickledObject, flags: int) -> None:
        super().__init__()
        self.route = route
        self.method = method
        self.pickled: PickledObject | None = None
        """Arguments with buffers outside the pickle, held until the call is answered; None if there are none."""
        if type(body) is not bytes:
            assert isinstance(body, PickledObject)
            self.pickled, body = body, body.pickle
        self.body = body
        self.size = len(body)
        self.transfer: OutgoingTransfer | None = None
        self.flags = flags
        self.deadline: float | None = None
        self.repeats = 0
        """Number of times the call may be delivered again."""
        self.chain: tuple[str, ...] = ()
        """Links of the actor calls that it is part of (`fray.runtime.deadlock`), that of its maker last."""
        self.mark = ""
        """Id of the call in that chain."""
        self.number = 0
        """Number on its connection; 0 until it is sent."""
        self.binding: CallBinding | None = None
        self.cancelled = False
        self.fallback: Callable[[CallFuture], CallRoute | None] | None = None
        """Chooses another actor for a call that may be sent again when its actor is gone."""
        self.not_delivered = False
        """The call failed, and surely had no effect."""
        # Here and not where it is sent: on the thread of its maker, whose span is the parent.
        self.trace = b"" if tracing.active is None else tracing.active.start_call(self, route.label, method)
        """``traceparent`` of its span, which its host is sent; empty: none."""

    def __repr__(self) -> str:
        state = ("pending", "returned", "failed", "returned", "failed")[self._state]
        return f"<call of {self.description}: {state}>"

    # For callers -----------------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, T_co]:
        return self.wait().__await__()

    async def wait(self) -> T_co:
        """Wait for the answer and return the result; see the class."""
        await self.wait_done()
        return self.result()

    async def wait_done(self) -> None:
        """Wait until the call is answered or its deadline has passed. Cancelling the wait cancels as for `wait`."""
        if not self._state:
            try:
                if self.deadline is None:
                    await self._park()
                else:
                    await self._park_until(self.deadline)
            # A remote task has no owner but the tasks that await it: when the last one is cancelled, it is cancelled as
            # well, as a child task in a Trio nursery would be.
            except trio.Cancelled:
                await self._leave()
                raise

    def exception(self) -> BaseException | None:
        """Return the error of a call that is `done`, or None."""
        try:
            self.result()
        except BaseException as error:  # noqa: BLE001 - the error is the answer
            return error
        return None

    def failure(self) -> tuple[str, str] | None:
        """Return type and message of the error of a settled call, without unpickling it; None: a result."""
        if self._state == _PICKLED_ERROR:
            return errors.describe_error(self._value)
        return (type(self._value).__name__, str(self._value)) if self._state == ERROR else None

    def cancel(self) -> None:
        """Request the callee to stop; return at once. The answer may still be a result."""
        if not self._state and not self.cancelled:
            self.cancelled = True
            self.route.cancel(self)

    async def _park(self) -> None:
        inside = current_actor_var.get()
        if inside is None:
            await super()._park()
            return
        # The host of the calling actor proves cycles from these sets (`fray.runtime.deadlock`).
        inside.waits.add(self)
        try:
            await super()._park()
        finally:
            inside.waits.discard(self)

    async def _park_until(self, deadline: float) -> None:
        # The host keeps the deadline as well; this one ends the wait also when the host is silent or out of reach.
        with trio.CancelScope(deadline=deadline) as scope:
            await self._park()
        if scope.cancelled_caught and not self._state:
            text = f"no answer to {self.description} before its deadline"
            self.fail(DeadlineExceeded(text, method=self.method))  # first: the answer to the cancellation is ignored
            self.cancelled = True
            self.route.cancel(self)

    async def _leave(self) -> None:
        """Cancel the call if no other task awaits it, and wait a bounded time for the callee to stop."""
        if self._state or self._tasks:
            return
        self.cancel()
        # Without a connection no acknowledgement can arrive. With one, its wait is bounded: a cancelled scope must end
        # even if the callee ignores the cancellation.
        if not self._state and self.route.is_connected:
            with trio.move_on_after(CANCEL_WAIT_S, shield=True):
                await self._park()

    def _open(self) -> None:
        if self._state == _PICKLED_ERROR:
            self._value, self._state = errors.load_error(self._value), ERROR
            return
        try:
            self._value, self._state = pickling.unpack(self._value), VALUE
        # Stored as the error of the call, so that every `result()` raises the same.
        except Exception as error:  # noqa: BLE001 - constructors of user classes raise anything
            error.add_note(f"while unpickling the result of {self.description}")
            self._value, self._state = error, ERROR

    # For other processes ---------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        return f"{self.route.label}.{self.method}()"

    def encoded_outcome(self) -> tuple[bool, pickling.Enclosed]:
        is_pickled = self._state in (_PICKLED_VALUE, _PICKLED_ERROR)
        # Bytes are relayed unopened: this process may lack the classes. A result with received buffers has to be packed
        # again, as its buffers lie outside of the pickle.
        if is_pickled and isinstance(self._value, bytes | bytearray | memoryview):
            return self._state == _PICKLED_VALUE, bytes(self._value)
        return encode_outcome(self.exception(), self._value, f"the result of {self.description}")

    # For the connection ----------------------------------------------------------------------------------------------

    def answer(self, kind: int, flags: int, body: Any) -> None:
        """Settle with the body of a RESULT or FAULT frame; it is unpickled when the value is first used."""
        # After a deadline or a cancellation the answer may still arrive; the first settlement counts.
        if self._state:
            return
        if kind != _FAULT:
            self._state, self._value = _PICKLED_VALUE, body
        elif flags & CANCELLED:
            self._state, self._value = ERROR, self._cancelled_error()
        else:
            self._state, self._value = _PICKLED_ERROR, body
        self._wake()

    def answer_cancelled(self) -> None:
        """Settle as cancelled; the call had not been sent."""
        self.answer(_FAULT, CANCELLED, b"")

    def fail(self, error: BaseException) -> None:
        """Settle with an error made on this side."""
        if not self._state:
            self._state, self._value = ERROR, error
            self._wake()

    def _cancelled_error(self) -> FrayError:
        if self.cancelled:
            return CallCancelled(f"{self.description} was cancelled by its caller", method=self.method)
        # The caller did not ask for this cancellation, so it must not look like one of its own.
        return ActorDied(f"{self.description} was cancelled by its actor", method=self.method)

    def _wake(self) -> None:
        # Released at the settlement and not when the future is collected: users keep futures in lists.
        if self.pickled is not None:
            self.route.release_buffers(self.pickled)
            self.pickled = self.transfer = None
        super()._wake()


# Other futures -------------------------------------------------------------------------------------------------------


class Future(FutureBase[T_co]):
    """A result that arrives later. ``await`` it any number of times; a result that is there costs no checkpoint.

    An await that is cancelled cancels the work behind the future (if no other task awaits it), as with actor calls.
    """

    __slots__ = ("_description", "on_cancel")

    def __init__(self, description: str, on_cancel: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._description = description
        self.on_cancel = on_cancel

    # For waiters -----------------------------------------------------------------------------------------------------

    def exception(self) -> BaseException | None:
        """Return the error; None while pending and for a result."""
        if self._state > ERROR:
            self._open()
        return self._value if self._state == ERROR else None

    def cancel(self) -> None:
        """Ask for the end of the work; return at once. Awaiting raises `CallCancelled` unless a result comes first."""
        if not self._state and self.on_cancel is not None:
            self.on_cancel()

    # A generator and not `wait().__await__()`: a result that is there costs no coroutine.
    def __await__(self) -> Generator[Any, Any, T_co]:
        if not self._state:
            yield from self._wait().__await__()
        return self.result()

    async def _wait(self) -> None:
        try:
            await self._park()
        except trio.Cancelled:
            await self._leave()
            raise

    async def _leave(self) -> None:
        # Waiting for an acknowledgement makes sense only where there is work to cancel.
        if self._state or self._tasks or self.on_cancel is None:
            return
        self.cancel()
        if not self._state:
            with trio.move_on_after(CANCEL_WAIT_S, shield=True):
                await self._park()

    def __repr__(self) -> str:
        state = ("pending", "done", "failed", "done", "failed", "done")[self._state]
        return f"<Future of {self._description}: {state}>"

    # For other processes ---------------------------------------------------------------------------------------------

    @property
    def description(self) -> str:
        return self._description

    def encoded_outcome(self) -> tuple[bool, pickling.Enclosed]:
        # Relayed unopened, as for calls.
        if self._state in (_PICKLED_VALUE, _PICKLED_ERROR):
            return self._state == _PICKLED_VALUE, pickling.enclose_again(self._value)
        return encode_outcome(self.exception(), self._value, f"the result of {self._description}")

    # For the code that settles it: the first settlement counts, later ones change nothing ----------------------------

    def resolve(self, make_value: Callable[[], Any]) -> None:
        """Settle with a result that ``make_value`` makes when it is first used."""
        self._settle(_LAZY_VALUE, make_value)

    def resolve_pickled(self, data: pickling.Enclosed) -> None:
        """Settle with a pickled result, unpickled when it is first used."""
        self._settle(_PICKLED_VALUE, data)

    def fail_pickled(self, data: bytes) -> None:
        """Settle with an error packed by `dump_error`."""
        self._settle(_PICKLED_ERROR, data)

    def fail(self, error: BaseException) -> None:
        """Settle with an error."""
        self._settle(ERROR, error)

    def fail_cancelled(self) -> None:
        """Settle as cancelled."""
        self._settle(ERROR, CallCancelled(f"{self._description} was cancelled"))

    def _settle(self, state: int, value: Any) -> None:
        if self._state:
            return
        self._state, self._value = state, value
        self.on_cancel = None  # it refers to the work, which refers to this future: leave no cycle to the collector
        self._wake()

    def _open(self) -> None:
        try:
            if self._state == _PICKLED_ERROR:
                self._value, self._state = errors.load_error(self._value), ERROR
            # A lazy value is made by a function of the owner, such as one that reads it from the store; it fails in the
            # same ways as unpickling.
            else:
                self._value = self._value() if self._state == _LAZY_VALUE else pickling.open_enclosed(self._value)
                self._state = VALUE
        except Exception as error:  # noqa: BLE001 - constructors of user classes raise anything
            error.add_note(f"while unpickling the result of {self._description}")
            self._value, self._state = error, ERROR
