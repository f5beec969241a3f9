"""Futures of other processes, unpickled here; see `fray.runtime.objects.exports`."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

from fray.errors import ActorDied, MachineLost
from fray.model.ids import ActorId
from fray.runtime.calls.futures import CallFuture, Future, register_export
from fray.runtime.objects.exports import ExportableFuture, call_export, exports_of
from fray.runtime.runtime import current, current_or_none


def export_future(future: ExportableFuture, what: str) -> tuple[Any, ...]:
    """Return what ``future.__reduce__`` returns. Raises FrayError outside a cluster, ChannelFull."""
    exports = exports_of(current())
    return import_future, (exports.actor_id, exports.export(future), what)


def import_future(owner: ActorId, number: int, what: str) -> Any:
    """Return the future: the original in the process that made it, elsewhere an `ImportedFuture`."""
    runtime = current_or_none()
    if runtime is not None:
        exports = exports_of(runtime)
        # Unpickled by its author: the original, or awaiting it would be a call to the own process.
        future = exports.find(number) if exports.actor_id == owner else None
        if future is not None:
            return future
    # Also without a runtime: a payload may be unpickled before there is one; it is needed only when the future is used.
    return ImportedFuture(owner, number, what)


class ImportedFuture(Future):
    """Future that settles as its original does; the request is sent when the future is first awaited or polled.

    Awaits may be cancelled and repeated: cancelling an await here cancels nothing at the author, since other processes
    may wait for the same future. `cancel` asks the author's process to cancel the original. Once that process is gone,
    awaiting raises `ActorDied`.
    """

    __slots__ = ("_call", "_number", "_owner")

    def __init__(self, owner: ActorId, number: int, what: str) -> None:
        super().__init__(what)
        self._owner, self._number = owner, number
        self._call: CallFuture | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return import_future, (self._owner, self._number, self._description)

    def _request(self) -> None:
        # Not at unpickling: a future that is only passed on costs its author nothing.
        if self._call is None:
            self._call = call_export(current(), self._owner, "wait", self._number)
            self._call.add_done_callback(self._on_answer)

    def _on_answer(self, call: CallFuture) -> None:
        error = call.exception()
        if error is None:
            is_result, data = call.result()
            (self.resolve_pickled if is_result else self.fail_pickled)(data)
        # A silent machine may come back, so the outcome is not lost yet; the error is raised as it is.
        elif isinstance(error, ActorDied) and not isinstance(error, MachineLost):
            gone = ActorDied(
                f"the outcome of {self._description} is lost: the process that made this future is gone",
                of=self._description,
            )
            gone.__cause__ = error
            self.fail(gone)
        else:
            self.fail(error)

    def done(self) -> bool:
        # A poll has to start the request, or a loop over `done` would never see it settled.
        self._request()
        return super().done()

    def add_done_callback(self, callback: Callable[[Any], object]) -> None:
        self._request()
        super().add_done_callback(callback)

    def __await__(self) -> Generator[Any, Any, Any]:
        self._request()
        return super().__await__()

    def cancel(self) -> None:
        if not super().done():
            # Not waited for: the outcome of the cancellation arrives as that of the future.
            call_export(current(), self._owner, "cancel", self._number)


register_export(export_future)
