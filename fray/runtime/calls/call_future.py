"""One call as its caller sees it: made at once, answered later, awaited by any number of tasks."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

import trio

from fray.errors import ActorDied, CallCancelled, DeadlineExceeded, FrayError, NotPicklable
from fray.net.codec import Kind
from fray.runtime.calls.future_base import ERROR, VALUE, FutureBase
from fray.runtime.calls.wire import CANCELLED
from fray.runtime.current_call import current_actor_var
from fray.runtime.serialization import errors, pickling
from fray.runtime.serialization.buffer_transfer import OutgoingTransfer, unpack
from fray.runtime.serialization.buffers import PickledObject

if TYPE_CHECKING:
    from fray.runtime.calls.route import Route, RouteBinding

CANCEL_WAIT_S = 5.0
"""How long a cancelled caller waits until the callee has acknowledged."""

_RAW_RESULT, _RAW_FAULT = range(ERROR + 1, ERROR + 3)
_FAULT = int(Kind.FAULT)


class CallFuture(FutureBase):
    """The answer to one call; ``await`` it for the result.

    Awaiting raises what the method raised, or the `FrayError` that says why there is no answer. An await that is
    cancelled cancels the call (when nobody else awaits it) and waits up to `CANCEL_WAIT_S` for the callee to say so.
    An answer that is there already is returned without a checkpoint.
    """

    __slots__ = (
        "binding",
        "body",
        "cancelled",
        "chain",
        "deadline",
        "elsewhere",
        "flags",
        "mark",
        "method",
        "number",
        "parcel",
        "repeats",
        "route",
        "shipped",
        "size",
        "undelivered",
    )

    def __init__(self, route: Route, method: str, body: bytes | PickledObject, flags: int) -> None:
        super().__init__()
        self.route = route
        self.method = method
        self.parcel: PickledObject | None = None
        """Its buffers, until it is answered."""
        if type(body) is not bytes:
            assert isinstance(body, PickledObject)
            self.parcel, body = body, body.pickle
        self.body = body
        self.size = len(body)
        self.shipped: OutgoingTransfer | None = None
        self.flags = flags
        self.deadline: float | None = None
        self.repeats = 0
        self.chain: tuple[str, ...] = ()
        """Links of the actor calls that it is part of (`fray.runtime.deadlock`), the last of them its maker."""
        self.mark = ""
        """What its link calls it."""
        self.number = 0
        self.binding: RouteBinding | None = None
        self.cancelled = False
        self.elsewhere: Callable[[CallFuture], Route | None] | None = None
        """Asked, when the actor is gone and it may be sent again, for another one."""
        self.undelivered = False
        """It failed, and had surely no effect."""

    def __repr__(self) -> str:
        said = ("pending", "returned", "failed", "returned", "failed")[self._state]
        return f"<call of {self.route.label}.{self.method}(): {said}>"

    # For whoever waits -----------------------------------------------------------------------------------------------

    def __await__(self) -> Generator[Any, Any, Any]:
        return self.wait().__await__()

    async def wait(self) -> Any:
        """The result; see the class."""
        await self.wait_done()
        return self.result()

    async def wait_done(self) -> None:
        """Wait until there is an answer, or the call's deadline has made one. Cancelling it cancels as for `wait`."""
        if not self._state:
            try:
                if self.deadline is None:
                    await self._park()
                else:
                    await self._park_until(self.deadline)
            except trio.Cancelled:
                await self._leave()
                raise

    def exception(self) -> BaseException | None:
        """The error of a call that is `done`, or None."""
        try:
            self.result()
        except BaseException as error:  # noqa: BLE001 - it is the answer
            return error
        return None

    def cancel(self) -> None:
        """Ask the callee to stop; returns at once. The answer may still be a result."""
        if not self._state and not self.cancelled:
            self.cancelled = True
            self.route.cancel(self)

    async def _park(self) -> None:
        inside = current_actor_var.get()
        if inside is None:
            await super()._park()
            return
        inside.waits.add(self)
        try:
            await super()._park()
        finally:
            inside.waits.discard(self)

    async def _park_until(self, deadline: float) -> None:
        with trio.CancelScope(deadline=deadline) as scope:
            await self._park()
        if scope.cancelled_caught and not self._state:
            text = f"no answer to {self.route.label}.{self.method}() before its deadline"
            self.fail(DeadlineExceeded(text, method=self.method))  # first: what cancelling it answers comes too late
            self.cancelled = True
            self.route.cancel(self)

    async def _leave(self) -> None:
        """Cancelled: tell the callee, and give it a bounded time to say that it has stopped."""
        if self._state or self._tasks:
            return
        self.cancel()
        if not self._state and self.route.is_connected:
            with trio.move_on_after(CANCEL_WAIT_S, shield=True):
                await self._park()

    def _open(self) -> None:
        if self._state == _RAW_FAULT:
            self._value, self._state = errors.load_error(self._value), ERROR
            return
        try:
            self._value, self._state = unpack(self._value), VALUE
        except Exception as error:  # noqa: BLE001 - constructors of user classes raise anything
            error.add_note(f"while unpickling the result of {self.route.label}.{self.method}()")
            self._value, self._state = error, ERROR

    # For other processes ---------------------------------------------------------------------------------------------

    @property
    def what(self) -> str:
        """What was called, for people."""
        return f"{self.route.label}.{self.method}()"

    def closed(self) -> tuple[bool, bytes]:
        """Of a settled one: whether it is a result, and the pickled result, or the error as `dump_error` packs it."""
        if self._state in (_RAW_RESULT, _RAW_FAULT) and isinstance(self._value, bytes | bytearray | memoryview):
            return self._state == _RAW_RESULT, bytes(self._value)
        return encode_outcome(self.exception(), self._value, f"the result of {self.route.label}.{self.method}()")

    # For the caller's tables -----------------------------------------------------------------------------------------

    def answer(self, kind: int, flags: int, body: Any) -> None:
        """The answer as it came; unpickled by whoever asks first."""
        if self._state:
            return
        if kind != _FAULT:
            self._state, self._value = _RAW_RESULT, body
        elif flags & CANCELLED:
            self._state, self._value = ERROR, self._stopped()
        else:
            self._state, self._value = _RAW_FAULT, body
        self._wake()

    def answer_cancelled(self) -> None:
        """It was cancelled before anybody else knew of it."""
        self.answer(_FAULT, CANCELLED, b"")

    def fail(self, error: BaseException) -> None:
        """End the call with an error made on this side."""
        if not self._state:
            self._state, self._value = ERROR, error
            self._wake()

    def _stopped(self) -> FrayError:
        if self.cancelled:
            return CallCancelled(f"{self.route.label}.{self.method}() was cancelled by its caller", method=self.method)
        return ActorDied(f"{self.route.label}.{self.method}() was cancelled by its actor", method=self.method)

    def _wake(self) -> None:
        if self.parcel is not None:
            self.route.caller.bulk.ended(self.parcel)
            self.parcel = self.shipped = None
        super()._wake()


def encode_outcome(error: BaseException | None, value: Any, what: str) -> tuple[bool, bytes]:
    """An opened outcome, closed again."""
    try:
        return (True, pickling.dumps(value, what)) if error is None else (False, errors.dump_error(error))
    except NotPicklable as problem:
        return False, errors.dump_error(problem)
