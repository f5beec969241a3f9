"""Portal between threads and the loop: every request of sync code, and of asyncio code, goes through here.

A thread waits for its request on a lock that the loop releases, which Ctrl-C interrupts; asyncio code, in `fray.aio`,
on an event of its own loop. Invariants: a burst of requests costs the loop one wake-up (a deque, and one
`run_sync_soon` while it is not empty). Requests that wait run as tasks of the loop, in the nursery of the innermost
``with`` block of the requester, so that a failing scope also ends the waits of its body.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager, suppress
from contextvars import Context, ContextVar, copy_context
from typing import Any, Generic, Protocol, TypeVar

import trio

from fray.errors import BlockingNotAllowed, ChannelClosed, FrayError, ScopeCancelled
from fray.runtime import waits as waits  # marks waits of threads, so that their job lends its CPUs
from fray.runtime.current_call import awaiting as awaiting  # marks waits of threads, so that cycles are detected
from fray.runtime.notebook_cells import context_without_cell
from fray.runtime.runtime import Runtime, set_current
from fray.tracebacks import is_same_error, print_interrupt_short, shorten_traceback

log = logging.getLogger("fray.blocking")

T = TypeVar("T")

INTERRUPTED_WAIT_S = 15.0
"""Seconds after Ctrl-C, or a cancellation in asyncio, that the requester waits for the end of its request."""
# Threads can make calls faster than the loop sends them; without a limit the queue grows with the program's loop.
BEHIND_CALLS = 4096
"""Number of requests pending in the loop beyond which the threads that make them wait."""


def refuse_in_loop(what: str = "this would wait") -> None:
    """Raise if the running code belongs to a Trio loop: blocking there would also stop the work that is waited for.

    Raises:
        BlockingNotAllowed: called in a done-callback, an async method, or a sync method of a class that has async
            methods.
    """
    if trio.lowlevel.in_trio_run():
        raise BlockingNotAllowed(
            f"{what}, and the loop's own thread must not wait: in a done-callback use only futures that are done; "
            "in async code use `fray` and await, or call this in `trio.to_thread.run_sync`"
        )


portals: weakref.WeakSet[Portal] = weakref.WeakSet()


class Portal:
    """Entry for threads into one loop: `send` makes a request without a reply, `run` and `call` wait for the reply."""

    def __init__(self, token: trio.lowlevel.TrioToken, nursery: trio.Nursery, runtime: Runtime | None = None) -> None:
        self.runtime = runtime
        self.extras: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
        """Objects shared by the users of this portal: the `CallSender` of an actor, by its route."""
        self._token = token
        self._nursery = nursery
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._is_scheduled = False
        self._broken: str | None = None
        portals.add(self)

    def break_off(self, why: str) -> None:
        """Mark the loop as not in this process (any more)."""
        self._broken = why

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def check_here(self) -> None:
        """Raise BlockingNotAllowed in a process that was forked from the loop's: no reply of the loop ever
        arrives there.
        """
        if self._broken is not None:
            raise BlockingNotAllowed(self._broken, reason="forked")

    @property
    def is_behind(self) -> bool:
        """True if so many requests are pending that callers should wait."""
        return len(self._queue) > BEHIND_CALLS

    def send(self, fn: Callable[..., object], *args: Any) -> None:
        """Call ``fn(*args)`` in the loop, soon and in order; do not wait. It must not raise.

        Raises:
            ChannelClosed: the loop has ended.
            BlockingNotAllowed: this process was forked from the loop's.
        """
        self.check_here()
        self._queue.append((fn, args))
        # One wake-up for a burst: a hop through a portal for each request costs 150 us, a shared one 60 us.
        if not self._is_scheduled:
            self._is_scheduled = True
            try:
                self._token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                # So that the next request is refused as well, instead of being queued for ever.
                self._is_scheduled = False
                raise ended() from None

    def _drain(self) -> None:
        self._is_scheduled = False  # first: a request from now on schedules another call
        queue = self._queue
        # Only what is there now: requests that these make are left to the next round, so that other tasks run.
        for _ in range(len(queue)):
            fn, args = queue.popleft()
            try:
                fn(*args)
            except Exception:
                log.exception("%r failed in the loop", fn)

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call ``fn(*args)`` in the loop and return what it returns, or raise what it raises. Raises as `send`."""
        request: _ThreadRequest[T] = _ThreadRequest(self, fn, args)
        self.send(request.do)
        return request.wait()

    def call(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Call an async function in the loop and return or raise its outcome. Ctrl-C cancels it, waits for it
        (bounded), and is raised.

        Raises:
            ScopeCancelled: the scope around this code is ending. And as `send`.
        """
        request: _ThreadRequest[T] = _ThreadRequest(self, fn, args)
        request.send()
        return request.wait()

    def call_within(self, timeout: float | None, late: str, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """Call an async function for at most ``timeout`` seconds (None: no limit). Raises TimeoutError that begins with
        ``late``.
        """

        async def within() -> T:
            with trio.move_on_after(math.inf if timeout is None else max(0.0, timeout)):
                return await fn(*args)
            raise TimeoutError(f"{late} after {timeout:g} s")

        return self.call(within)

    def _innermost_nursery(self) -> trio.Nursery:
        context = _innermost.get()
        # A block of another cluster's loop cannot run this request.
        if context is not None and context.portal._token is self._token and context.nursery is not None:
            return context.nursery
        return self._nursery

    @property
    def nursery(self) -> trio.Nursery:
        return self._nursery


class Turn(Protocol):
    """Wait of a requester until the loop releases it: a lock that is held, or an event of an asyncio loop."""

    def locked(self) -> bool: ...

    def release(self) -> None: ...


class LoopRequest(Generic[T]):
    """Request that runs in the loop; ``turn`` is released when its outcome is there.

    ``fn``: sync for `do`; for `send`, returns an awaitable.
    """

    def __init__(self, portal: Portal, fn: Callable[..., Any], args: tuple[Any, ...], turn: Turn) -> None:
        refuse_in_loop()
        self._portal = portal
        self._fn, self._args = fn, args
        self._value: Any = None
        self._error: BaseException | None = None
        self._scope = trio.CancelScope()
        self._turn = turn
        # The request runs with the context variables of its requester, such as the current call and its deadline.
        self._context = copy_context()
        if portal.runtime is not None:
            self._context.run(set_current, portal.runtime)

    def send(self) -> None:
        """Begin it as a task, which is cancelled with the block around the requester. Raises as `Portal.send`."""
        # Looked up on the thread, where the context variables of the caller are.
        self._portal.send(self._begin, self._portal._innermost_nursery())

    def cancel(self) -> None:
        """Cancel its task; the turn is released when that has ended. Raises as `Portal.send`."""
        self._portal.send(self._scope.cancel)

    def outcome(self) -> T:
        """Return or raise the outcome, once the turn has been released."""
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    # In the loop

    def do(self) -> None:
        try:
            self._value = self._context.run(self._fn, *self._args)
        except BaseException as error:  # noqa: BLE001 (raised in the waiting thread)
            self._error = error
        self._turn.release()

    def _begin(self, nursery: trio.Nursery) -> None:
        try:
            self._context.run(nursery.start_soon, self._go)
        # Trio's error for a nursery that accepts no more tasks.
        except RuntimeError:  # the nursery is closed
            self._error = ended()
            self._turn.release()
            return
        # Here and not in the task: Trio starts tasks in any order, and what a function does before it returns its
        # awaitable, such as sending a call, is done in the order of the requests.
        try:
            self._value = self._context.run(self._fn, *self._args)
        except BaseException as error:  # noqa: BLE001 (raised in the waiting thread)
            self._error = error

    async def _go(self) -> None:
        try:
            with self._scope:
                if self._error is None:
                    self._value = await self._value
        except BaseException as error:  # noqa: BLE001 (raised in the waiting thread)
            outcome, cancelled = _split_cancelled(error)
            self._error = outcome or ScopeCancelled(
                "cancelled: the scope or cluster around this code is ending; leave its `with` to see why"
            )
            # Trio requires that Cancelled reaches its scope; the thread gets an error of Fray instead.
            if cancelled is not None:
                raise cancelled from None
        finally:
            self._turn.release()


class _ThreadRequest(LoopRequest[T]):
    """Request of a waiting thread."""

    def __init__(self, portal: Portal, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # A lock and not an Event: it is the cheapest wait there is, and Ctrl-C interrupts its `acquire`.
        self._lock = threading.Lock()
        super().__init__(portal, fn, args, self._lock)
        self._lock.acquire()

    def wait(self) -> T:
        try:
            self._lock.acquire()
        except BaseException:  # Ctrl-C: cancel the request, then propagate
            with suppress(FrayError):  # the loop has ended by itself
                self.cancel()
                # Bounded: a second Ctrl-C must not be needed because a cluster is out of reach.
                self._lock.acquire(timeout=INTERRUPTED_WAIT_S)
            raise
        return self.outcome()


def _split_cancelled(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """Split an error into the part for the waiting thread and Trio's own cancellation, which must propagate in
    the loop.
    """
    if isinstance(error, trio.Cancelled):
        return None, error
    if isinstance(error, BaseExceptionGroup):
        cancelled, rest = error.split(trio.Cancelled)
        return rest, cancelled
    return error, None


def ended() -> ChannelClosed:
    return ChannelClosed("the cluster connection of this handle has ended: open a cluster again", reason="closed")


# `async with` for a `with` -------------------------------------------------------------------------------------------


class HeldContext(Generic[T]):
    """``async with`` block of the loop, around a body that runs elsewhere.

    Args:
        entered, left: released when it has been entered and left; both if it has ended before.
        on_cancelled: called in the loop if the block is cancelled, as by a failed child, while its body runs.
    """

    def __init__(
        self,
        portal: Portal,
        manager: AbstractAsyncContextManager[T],
        entered: Turn,
        left: Turn,
        on_cancelled: Callable[[], object] = lambda: None,
    ) -> None:
        self.portal = portal
        self.nursery: trio.Nursery | None = None
        """Nursery of the requests of the body, while the block is open."""
        self.outcome: BaseException | None = None
        self.has_ended = False
        self._manager = manager
        self._value: T | None = None
        self._error: BaseException | None = None
        self._leaving: trio.Event | None = None
        self._scope = trio.CancelScope()
        self._entered, self._left, self._on_cancelled = entered, left, on_cancelled
        self._outer: HeldContext[Any] | None = None

    def begin_entering(self) -> None:
        """Begin to enter the block; wait for ``entered``, then take `value`. Raises as `Portal.send`."""
        refuse_in_loop("entering this waits")
        around = context_without_cell()  # the block may stay open for many cells
        if self.portal.runtime is not None:
            around.run(set_current, self.portal.runtime)
        self.portal.send(self._begin, around, self.portal._innermost_nursery())

    def value(self, *, around_body: bool = True) -> T:
        """Return the value of the entered block, or raise what entering has raised.

        ``around_body``: from now until `begin_leaving`, waits of this context are cancelled when the block is.
        """
        if self.outcome is not None:
            raise self.outcome
        if around_body:
            self._outer = _innermost.get()
            _innermost.set(self)
        return self._value  # type: ignore[return-value]

    def begin_leaving(self, error: BaseException | None = None, *, cancel: bool = False) -> None:
        """Begin to leave the block, whose body has raised ``error``; then wait for ``left``, and call `raise_outcome`.

        ``cancel``: cancel the block instead, also if it is still being entered.
        """
        if _innermost.get() is self:
            _innermost.set(self._outer)
        refuse_in_loop("leaving this waits")
        with suppress(ChannelClosed):  # the loop has ended, and this with it
            if cancel:
                self.portal.send(self._scope.cancel)
            self.portal.send(self._begin_leaving, error)

    def raise_outcome(self, error: BaseException | None) -> None:
        """Raise what leaving has raised, once; not ``error`` itself, which the caller raises again."""
        outcome, self.outcome = self.outcome, None
        if isinstance(error, KeyboardInterrupt):
            shorten_traceback(error)
            print_interrupt_short()
        if outcome is not None and not (error is not None and is_same_error(outcome, error)):
            shorten_traceback(outcome)
            raise outcome

    # In the loop

    def _begin(self, around: Context, nursery: trio.Nursery) -> None:
        self._leaving = trio.Event()
        try:
            around.run(nursery.start_soon, self._hold)
        except RuntimeError:  # the nursery is closed
            self._end(ended())

    def _begin_leaving(self, error: BaseException | None) -> None:
        self._error = error
        if self._leaving is not None:
            self._leaving.set()

    async def _hold(self) -> None:
        try:
            with self._scope:
                async with self._manager as self._value:
                    await self._wait_leave()
        except BaseException as error:  # noqa: BLE001 (raised in the thread that leaves)
            outcome, cancelled = _split_cancelled(error)
            self._end(outcome or ScopeCancelled("cancelled: the cluster of this block has ended"))
            if cancelled is not None:
                raise cancelled from None
        else:
            self._end(None)

    async def _wait_leave(self) -> None:
        assert self._leaving is not None
        # Requests of the body run in here, inside of the block: if a child fails, they are cancelled with it.
        async with trio.open_nursery() as self.nursery:
            self._entered.release()
            try:
                await self._leaving.wait()
            except trio.Cancelled:
                self._on_cancelled()
                raise
            # Threads that the body has started may still wait in the block; it ends nonetheless.
            self.nursery.cancel_scope.cancel()
        self.nursery = None
        if self._error is not None:
            raise self._error

    def _end(self, outcome: BaseException | None) -> None:
        self.outcome, self.has_ended = outcome, True
        for lock in (self._entered, self._left):
            if lock.locked():
                lock.release()


class BlockingContext(HeldContext[T]):
    """``async with`` block that a thread keeps open: `enter`, then `leave` with the error of its body, or None."""

    def __init__(self, portal: Portal, manager: AbstractAsyncContextManager[T]) -> None:
        self._locks = threading.Lock(), threading.Lock()
        super().__init__(portal, manager, *self._locks)

    def enter(self, *, around_body: bool = True) -> T:
        """Enter the block and return its value. Raises what entering raises. ``around_body``: as for `value`."""
        # Taken now and released by the loop: the next `acquire` of each is the wait.
        for lock in self._locks:
            lock.acquire()
        self.begin_entering()
        try:
            self._locks[0].acquire()
        except BaseException as interrupt:
            # Interrupted while entering: the block may be entered half, and is left in order.
            self.begin_leaving(cancel=True)
            self.leave(interrupt)
            raise
        return self.value(around_body=around_body)

    def leave(self, error: BaseException | None = None) -> None:
        """Leave the block, whose body has raised ``error``; does nothing if it has been left.

        Raises:
            BaseException: what leaving raises; not ``error`` itself, which the caller raises again.
        """
        self.begin_leaving(error)
        left = self._locks[1]
        try:
            # Waits for the release, and leaves the lock free for a second `leave`.
            with left:
                pass
        except BaseException:  # Ctrl-C while the block waits for its children: end them, then propagate
            self.begin_leaving(cancel=True)
            if left.acquire(timeout=INTERRUPTED_WAIT_S):
                left.release()
            raise
        self.raise_outcome(error)


_innermost: ContextVar[HeldContext[Any] | None] = ContextVar("fray_blocking_held", default=None)
