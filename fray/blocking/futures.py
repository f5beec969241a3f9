"""Futures for sync code, in the shape of `concurrent.futures`: of actor calls and of pool tasks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, Generic, Protocol, TypeVar

from fray.api.futures import Future
from fray.blocking.bridge import pickling
from fray.blocking.bridge.portal import Portal, awaiting, refuse_in_loop
from fray.model.ids import ActorId

log = logging.getLogger("fray.blocking")

T = TypeVar("T")


class WaitableResult(Protocol):
    """What a future shows to other threads: a call of an actor, or a task of a pool."""

    def add_done_callback(self, callback: Callable[[Any], None]) -> None: ...

    def result(self) -> Any: ...

    @property
    def description(self) -> str:
        """Name of the call or task whose result it is."""

    def encoded_outcome(self) -> tuple[bool, bytes]:
        """Return whether a settled one has a result, and the pickled result or error."""


class ActorFuture(Generic[T]):
    """A result that arrives later. It may be asked from any thread, any number of times; unread, the call still runs.

    The result is unpickled by the thread that asks first.
    """

    __slots__ = ("_answer", "_callbacks", "_done", "_portal", "_shared", "_turn")

    def __init__(self, answer: WaitableResult, portal: Portal) -> None:
        self._answer = answer
        self._portal = portal
        self._done = False
        self._shared: Future | None = None
        """What other processes ask for, once this has been pickled."""
        self._callbacks: list[Callable[[ActorFuture[T]], object]] = []
        self._turn = threading.Lock()
        """Held until the answer is there, then by whoever opens it."""
        self._turn.acquire()
        answer.add_done_callback(self._settle)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result and return it, or raise what the call raised, with the remote traceback as cause.

        Args:
            timeout: seconds; after them `TimeoutError`, and the call goes on: ask again. Default: no end.

        Raises:
            TimeoutError: the built-in one.
            FrayError: in the loop's own thread (a done-callback), when the answer is not there yet; or why there is
                no answer: ActorDied, MachineLost, OutcomeUnknown, DeadlineExceeded, ChannelClosed, BlockingNotAllowed
                (forked).
        """
        if not self._turn.acquire(False):
            self._wait(timeout)
        try:
            return self._open()
        finally:
            self._turn.release()

    def _open(self) -> T:
        """Whoever holds the turn."""
        value: T = self._answer.result()
        return value

    def _wait(self, timeout: float | None) -> None:
        if not self._done:  # else another thread opens it just now
            refuse_in_loop("this future has no answer yet, result() would wait")
            self._portal.check_here()
        with awaiting(self._answer):
            got = self._turn.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX))
        if not got:
            raise TimeoutError(f"no answer within {timeout:g} s; the call goes on: ask again, or cancel() it")

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error of a call that has failed; None when it returned, and while it is pending: this never waits.

        ``timeout`` is there for the shape and does nothing.
        """
        if not self._done:
            return None
        with self._turn:
            try:
                self._answer.result()
            except BaseException as error:  # noqa: BLE001 (it is the answer)
                return error
        return None

    def done(self) -> bool:
        """Whether the answer is there."""
        return self._done

    def cancel(self) -> bool:
        """Ask the callee to stop, and whether that can be: not once the answer is there, nor for a pool's task.
        It may still come to a result."""
        cancel = getattr(self._answer, "cancel", None)
        if self._done or cancel is None:
            return False
        self._portal.send(cancel)
        return True

    def add_done_callback(self, callback: Callable[[ActorFuture[T]], object]) -> None:
        """Call ``callback(self)`` when the answer is there: in the loop's thread, so it must be short and never wait;
        at once, in this thread, if it is there. What it raises is logged."""
        if self._done:
            self._call(callback)
        else:
            self._portal.send(self._add, callback)

    # In the loop

    def _add(self, callback: Callable[[ActorFuture[T]], object]) -> None:
        if self._done:
            self._call(callback)
        else:
            self._callbacks.append(callback)

    def _settle(self, answer: object) -> None:
        self._done = True
        self._share()
        self._turn.release()
        for callback in self._callbacks:
            self._call(callback)
        self._callbacks = []

    def _call(self, callback: Callable[[ActorFuture[T]], object]) -> None:
        try:
            callback(self)
        except Exception:
            log.exception("a done-callback of %r failed", self)

    def _share(self) -> None:
        """While nobody can open the answer: pass it on as it came."""
        if self._shared is not None:
            is_result, data = self._answer.encoded_outcome()
            (self._shared.resolve_pickled if is_result else self._shared.fail_pickled)(data)

    def _end(self) -> None:
        self.cancel()

    def _address(self) -> tuple[ActorId, int, str]:
        """Where other processes ask for it."""
        what = self._answer.description
        if self._shared is None:
            self._shared = Future(what, self._end)
            if self._done:
                with self._turn:
                    self._share()
        return *pickling.export(self._portal, self._shared), what

    def __reduce__(self) -> tuple[Any, ...]:
        """Where it arrives it is one of this face, and comes to the same."""
        return _arrived, (*pickling.in_loop(self._portal, self._address), type(self))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._answer!r}>"


class BroadcastFuture(ActorFuture[Any]):
    """What one actor of a broadcast answers. An error of the call is an answer like others: `result` returns it."""

    __slots__ = ()

    def _open(self) -> Any:
        try:
            return super()._open()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 (it is this actor's answer)
            return error


def _arrived(owner: ActorId, number: int, what: str, kind: type[ActorFuture[Any]] = ActorFuture) -> ActorFuture[Any]:
    return pickling.unpickle_in_loop(lambda portal: kind(pickling.future_of(owner, number, what), portal))


F = TypeVar("F", bound=ActorFuture[Any])


def as_completed(futures: Iterable[F], timeout: float | None = None) -> Iterator[F]:
    """The futures in the order in which their answers come.

    Raises:
        TimeoutError: not all within ``timeout`` seconds (default: no end).
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
            raise TimeoutError(f"{left} of {len(waiting)} answers have not come within {timeout:g} s") from None


def _next(ready: SimpleQueue[F], until: float | None) -> F:
    try:
        return ready.get_nowait()
    except Empty:
        refuse_in_loop("as_completed waits")
        return ready.get(timeout=None if until is None else max(0.0, until - monotonic()))


def wait_any(futures: Iterable[F], timeout: float | None = None) -> F:
    """The first future to have its answer.

    Raises:
        ValueError: there is none to wait for.
        TimeoutError: none within ``timeout`` seconds (default: no end).
    """
    for future in as_completed(futures, timeout):
        return future
    raise ValueError("wait_any needs at least one future")
