"""A result that arrives later: what pools give, and what futures of other processes become here."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import trio

from fray.errors import CallCancelled
from fray.runtime.calls.call_future import CANCEL_WAIT_S, encode_outcome
from fray.runtime.calls.future_base import ERROR, VALUE, FutureBase
from fray.runtime.serialization import errors, pickling

_CLOSED_VALUE, _CLOSED_ERROR, _MAKER = range(ERROR + 1, ERROR + 4)


class Future(FutureBase):
    """A result that arrives later. ``await`` it, any number of times; what is there already costs no checkpoint.

    An await that is cancelled cancels what the future stands for (when nobody else awaits it), as with actor calls.
    """

    __slots__ = ("_what", "on_cancel")

    def __init__(self, what: str, on_cancel: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._what = what
        self.on_cancel = on_cancel

    # For whoever waits -----------------------------------------------------------------------------------------------

    def exception(self) -> BaseException | None:
        """The error; None while pending, and for a result."""
        if self._state > ERROR:
            self._open()
        return self._value if self._state == ERROR else None

    def cancel(self) -> None:
        """Ask for its end; returns at once. Awaiting it then raises `CallCancelled`, if no result came before."""
        if not self._state and self.on_cancel is not None:
            self.on_cancel()

    def __await__(self) -> Generator[Any, Any, Any]:
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
        if self._state or self._tasks or self.on_cancel is None:
            return
        self.cancel()
        if not self._state:
            with trio.move_on_after(CANCEL_WAIT_S, shield=True):
                await self._park()

    def __repr__(self) -> str:
        said = ("pending", "done", "failed", "done", "failed", "done")[self._state]
        return f"<Future of {self._what}: {said}>"

    # For other processes ---------------------------------------------------------------------------------------------

    @property
    def what(self) -> str:
        """Of what it is the result, for people."""
        return self._what

    def closed(self) -> tuple[bool, bytes]:
        """Of a settled one: whether it is a result, and the pickled result, or the error as `dump_error` packs it."""
        if self._state in (_CLOSED_VALUE, _CLOSED_ERROR):
            return self._state == _CLOSED_VALUE, self._value
        return encode_outcome(self.exception(), self._value, f"the result of {self._what}")

    # For whoever settles it ------------------------------------------------------------------------------------------

    def resolve(self, open_value: Callable[[], Any]) -> None:
        """Settle with a result that is made when it is first asked for. Later settlements change nothing."""
        self._settle(_MAKER, open_value)

    def returned(self, data: bytes) -> None:
        """Settle with a pickled result; whoever asks first opens it."""
        self._settle(_CLOSED_VALUE, data)

    def raised(self, data: bytes) -> None:
        """Settle with an error as `remote_errors.dump_error` packs it."""
        self._settle(_CLOSED_ERROR, data)

    def fail(self, error: BaseException) -> None:
        """Settle with an error. Later settlements change nothing."""
        self._settle(ERROR, error)

    def cancelled(self) -> None:
        """Settle as cancelled."""
        self._settle(ERROR, CallCancelled(f"{self._what} was cancelled"))

    def _settle(self, state: int, value: Any) -> None:
        if self._state:
            return
        self._state, self._value = state, value
        self.on_cancel = None  # what it stood for knows this future: no cycle is left for the collector
        self._wake()

    def _open(self) -> None:
        try:
            if self._state == _CLOSED_ERROR:
                self._value, self._state = errors.load_error(self._value), ERROR
            else:
                self._value = self._value() if self._state == _MAKER else pickling.loads(self._value)
                self._state = VALUE
        except Exception as error:  # noqa: BLE001 - constructors of user classes raise anything
            error.add_note(f"while unpickling the result of {self._what}")
            self._value, self._state = error, ERROR
