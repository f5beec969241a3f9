"""Futures for sync code, which are those of `concurrent.futures`: of actor calls and of pool tasks."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Protocol, TypeVar

from fray.api.futures import Future
from fray.blocking.bridge import pickling
from fray.blocking.bridge.portal import Portal, awaiting, refuse_in_loop, waits
from fray.errors import CallCancelled, FrayError
from fray.model.ids import ActorId
from fray.tracebacks import shorten_traceback

T = TypeVar("T")

_FAILED = FrayError("the call has failed: result() raises its error")
"""Error of the base class's part of a future that has failed; it only says that there is one."""


class WaitableResult(Protocol):
    """Result that becomes available in the loop: that of an actor call, or of a pool task."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def result(self) -> Any: ...

    @property
    def has_failed(self) -> bool:
        """True if a completed call has an error; known without unpickling it."""

    @property
    def description(self) -> str:
        """Name of the call or task whose result it is."""

    def encoded_outcome(self) -> tuple[bool, Any]:
        """Return whether a completed call has a result, and the pickled result or error."""


class ActorFuture(concurrent.futures.Future[T]):
    """Result that arrives later: a `concurrent.futures.Future`, so `concurrent.futures.wait` and `asyncio.wrap_future`
    take it. Usable on any thread, any number of times; the call runs whether or not the result is read.

    The result is unpickled by the first thread that reads it. One lock, ``_turn``, is what waiting threads block on,
    what Ctrl-C interrupts, and the guard of the unpickling. The state of the base class only says that there is an
    outcome, for the functions of `concurrent.futures`.
    """

    def __init__(self, outcome: WaitableResult, portal: Portal) -> None:
        super().__init__()
        self._outcome = outcome
        self._portal = portal
        self._done = False
        self._shared: Future | None = None
        """Future for which other processes wait, once this one has been pickled."""
        self._turn = threading.Lock()
        """Held until the result has arrived, then by the thread that unpickles it."""
        self._turn.acquire()
        outcome.add_done_callback(self._on_done)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it, or raise what the call raised, with the remote traceback as cause.

        Args:
            timeout: seconds until `TimeoutError`; the call continues, and this may be called again. Default: no limit.

        Raises:
            TimeoutError: the built-in one.
            FrayError: called in the loop's own thread (a done-callback) before the result has arrived; or the reason
                why there is no result: ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, ChannelClosed,
                BlockingNotAllowed (forked).
        """
        if not self._turn.acquire(False):
            self._wait(timeout)
        try:
            return self._open()
        except Exception as error:
            shorten_traceback(error)
            raise
        finally:
            self._turn.release()

    def _open(self) -> T:
        """Return the result; the caller holds ``_turn``."""
        value: T = self._outcome.result()
        return value

    def _wait(self, timeout: float | None) -> None:
        if not self._done:  # else another thread is unpickling it
            refuse_in_loop("this future has no result yet, result() would wait")
            self._portal.check_here()
        with awaiting(self._outcome), waits.waiting():
            got = self._turn.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        if not got:
            raise TimeoutError(f"no result within {timeout:g} s; the call continues: ask again, or cancel() it")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the outcome; return the error of a call that has failed, None if it has returned.

        Args:
            timeout: as for `result`.

        Raises:
            TimeoutError, FrayError: there is no outcome yet, as for `result`.
        """
        if not self._turn.acquire(False):
            self._wait(timeout)
        try:
            self._outcome.result()
        except BaseException as error:  # noqa: BLE001 (it is the return value)
            shorten_traceback(error)
            return error
        finally:
            self._turn.release()
        return None

    def done(self) -> bool:
        """Return whether the outcome has arrived."""
        return self._done

    def cancel(self) -> bool:
        """Request cancellation of the call, whether it runs or not; return whether that is possible: not once the
        outcome has arrived. When the callee has stopped, `cancelled` is true and `result` raises CallCancelled; the
        call may still return a result.
        """
        cancel = getattr(self._outcome, "cancel", None)
        if self._done or cancel is None:
            return False
        self._portal.send(cancel)
        return True

    def cancelled(self) -> bool:
        """Return whether the call has ended because it was cancelled. Never waits."""
        return self._done and self._outcome.has_failed and isinstance(self.exception(), CallCancelled)

    def add_done_callback(self, fn: Callable[[ActorFuture[T]], object]) -> None:
        """Call ``fn(self)`` when the outcome has arrived: in the loop's thread, so it must be short and never wait;
        immediately, in this thread, if it has arrived. What it raises is logged.
        """
        super().add_done_callback(fn)  # type: ignore[arg-type]  # it is called with this very future

    # In the loop

    def _on_done(self, outcome: object) -> None:
        self._done = True
        self._share()
        self._turn.release()
        # Wakes the functions of `concurrent.futures`, and calls the callbacks: in the loop, so they must not wait.
        if self._outcome.has_failed:
            self.set_exception(_FAILED)
        else:
            self.set_result(None)  # type: ignore[arg-type]  # `result` reads the outcome

    def _share(self) -> None:
        """Pass the outcome on to other processes, still pickled."""
        if self._shared is not None:
            is_result, data = self._outcome.encoded_outcome()
            (self._shared.resolve_pickled if is_result else self._shared.fail_pickled)(data)

    def _end(self) -> None:
        self.cancel()

    def _address(self) -> tuple[ActorId, int, str]:
        """Return the address at which other processes wait for it: owner, number and description."""
        what = self._outcome.description
        if self._shared is None:
            self._shared = Future(what, self._end)
            if self._done:
                with self._turn:
                    self._share()
        return *pickling.export(self._portal, self._shared), what

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it as a future of the same kind and with the same outcome."""
        return _unpickle_future, (*pickling.in_loop(self._portal, self._address), type(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._outcome!r}>"


class BroadcastFuture(ActorFuture[Any]):
    """Result of one actor of a broadcast. An error of the call is a result, too: `result` returns it."""

    def _open(self) -> Any:
        try:
            return super()._open()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (it is this actor's result)
            return error


def _unpickle_future(
    owner: ActorId, number: int, what: str, kind: type[ActorFuture[Any]] = ActorFuture
) -> ActorFuture[Any]:
    return pickling.unpickle_in_loop(lambda portal: kind(pickling.future_of(owner, number, what), portal))


F = TypeVar("F", bound=ActorFuture[Any])


def as_completed(futures: Iterable[F], timeout: float | None = None) -> Iterator[F]:
    """Yield futures in the order in which their outcomes arrive.

    Raises:
        TimeoutError: not all within ``timeout`` seconds (default: no limit).
    """
    waiting = list(futures)
    ready: SimpleQueue[F] = SimpleQueue()
    for future in waiting:
        future.add_done_callback(ready.put)  # type: ignore[arg-type]  # it is called with this very future
    until = None if timeout is None else monotonic() + timeout
    for left in range(len(waiting), 0, -1):
        try:
            yield _next(ready, until)
        except Empty:
            raise TimeoutError(f"{left} of {len(waiting)} results have not arrived within {timeout:g} s") from None


def _next(ready: SimpleQueue[F], until: float | None) -> F:
    try:
        return ready.get_nowait()
    except Empty:
        refuse_in_loop("as_completed waits")
        return ready.get(timeout=None if until is None else max(0.0, until - monotonic()))


def wait_any(futures: Iterable[F], timeout: float | None = None) -> F:
    """Return the first future whose outcome arrives.

    Raises:
        ValueError: there is none to wait for.
        TimeoutError: none within ``timeout`` seconds (default: no limit).
    """
    for future in as_completed(futures, timeout):
        return future
    raise ValueError("wait_any needs at least one future")
