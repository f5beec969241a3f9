"""The one bridge between threads and the loop: everything sync code asks of Fray goes through here.

The law: a burst of requests costs the loop one wake-up (a deque, and one `run_sync_soon` while it is not empty). What
must wait runs as a task of the loop, in the nursery of the innermost ``with`` block around it, so that a scope that
fails ends the waits of its body too. A thread that waits holds a lock that the loop releases: Ctrl-C reaches it.
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
from typing import Any, Generic, TypeVar

import trio

from fray.errors import BlockingNotAllowed, ChannelClosed, FrayError, ScopeCancelled
from fray.runtime.current_call import awaiting as awaiting  # what waits on a thread says so: cycles are found by it
from fray.runtime.runtime import Runtime, set_current

log = logging.getLogger("fray.blocking")

T = TypeVar("T")

INTERRUPTED_WAIT_S = 15.0
"""After Ctrl-C: how long what was asked for may take to be taken back."""
BEHIND_CALLS = 4096
"""Requests the loop has not looked at: more, and the threads that make them wait."""


def refuse_in_loop(what: str = "this would wait") -> None:
    """Blocking in a loop stops everything, the answer that is waited for included.

    Raises:
        BlockingNotAllowed: the running code belongs to a Trio loop (a done-callback, an async method, a sync method
        of a class
            that has async ones).
    """
    if trio.lowlevel.in_trio_run():
        raise BlockingNotAllowed(
            f"{what}, and in the loop's own thread nobody may wait: in a done-callback use only futures that are "
            "done; in async code use `fray` and await, or call this in `trio.to_thread.run_sync`"
        )


portals: weakref.WeakSet[Portal] = weakref.WeakSet()


class Portal:
    """From any thread into one loop: `send` asks for something without an answer, `run` and `call` wait for one."""

    def __init__(self, token: trio.lowlevel.TrioToken, nursery: trio.Nursery, runtime: Runtime | None = None) -> None:
        self.runtime = runtime
        self.extras: weakref.WeakValueDictionary[object, Any] = weakref.WeakValueDictionary()
        """What belongs to this bridge and is shared: the line to an actor, by its route."""
        self._token = token
        self._nursery = nursery
        self._queue: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._poked = False
        self._broken: str | None = None
        portals.add(self)

    def break_off(self, why: str) -> None:
        """The loop is not in this process (any more)."""
        self._broken = why

    @property
    def is_broken(self) -> bool:
        return self._broken is not None

    def check_here(self) -> None:
        """Raises BlockingNotAllowed: this process was forked from the loop's, and what comes from there never comes
        here."""
        if self._broken is not None:
            raise BlockingNotAllowed(self._broken, reason="forked")

    @property
    def is_behind(self) -> bool:
        """So much is asked for that more should wait."""
        return len(self._queue) > BEHIND_CALLS

    def send(self, fn: Callable[..., object], *args: Any) -> None:
        """Have ``fn(*args)`` called in the loop, soon and in order. It must not raise.

        Raises:
            ChannelClosed: the loop has ended.
            BlockingNotAllowed: this process was forked from the loop's.
        """
        self.check_here()
        self._queue.append((fn, args))
        if not self._poked:
            self._poked = True
            try:
                self._token.run_sync_soon(self._drain)
            except trio.RunFinishedError:
                self._poked = False
                raise ended() from None

    def _drain(self) -> None:
        self._poked = False  # first: whoever comes from here on pokes again
        queue = self._queue
        for _ in range(len(queue)):
            fn, args = queue.popleft()
            try:
                fn(*args)
            except Exception:
                log.exception("%r failed in the loop", fn)

    def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Call ``fn(*args)`` in the loop and return what it returns, or raise what it raises. Raises as `send`."""
        errand: _LoopCall[T] = _LoopCall(self, fn, args)
        self.send(errand.do)
        return errand.wait()

    def call(self, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """The same for an async function. Ctrl-C cancels it, waits for that within bounds, and goes up.

        Raises:
            ScopeCancelled: the scope around this code is ending. And as `send`.
        """
        errand: _LoopCall[T] = _LoopCall(self, fn, args)
        self.send(errand.begin, self._place())
        return errand.wait()

    def call_within(self, timeout: float | None, late: str, fn: Callable[..., Coroutine[Any, Any, T]], *args: Any) -> T:
        """`call` for ``timeout`` seconds (None: no end). Raises TimeoutError, saying that ``late`` is so."""

        async def within() -> T:
            with trio.move_on_after(math.inf if timeout is None else max(0.0, timeout)):
                return await fn(*args)
            raise TimeoutError(f"{late} after {timeout:g} s")

        return self.call(within)

    def _place(self) -> trio.Nursery:
        held = _innermost.get()
        if held is not None and held.portal._token is self._token and held.nursery is not None:
            return held.nursery
        return self._nursery

    @property
    def nursery(self) -> trio.Nursery:
        return self._nursery


class _LoopCall(Generic[T]):
    """Something done in the loop for a thread that waits."""

    def __init__(self, portal: Portal, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        refuse_in_loop()
        self._portal = portal
        self._fn, self._args = fn, args
        self._value: Any = None
        self._error: BaseException | None = None
        self._scope = trio.CancelScope()
        self._turn = threading.Lock()
        self._turn.acquire()
        self._context = copy_context()
        if portal.runtime is not None:
            self._context.run(set_current, portal.runtime)

    def wait(self) -> T:
        try:
            self._turn.acquire()
        except BaseException:  # Ctrl-C: take back what was asked for, then go up
            with suppress(FrayError):  # the loop has ended by itself
                self._portal.send(self._scope.cancel)
                self._turn.acquire(timeout=INTERRUPTED_WAIT_S)
            raise
        if self._error is not None:
            raise self._error
        return self._value  # type: ignore[no-any-return]

    # In the loop

    def do(self) -> None:
        try:
            self._value = self._context.run(self._fn, *self._args)
        except BaseException as error:  # noqa: BLE001 (it belongs to the thread that waits)
            self._error = error
        self._turn.release()

    def begin(self, nursery: trio.Nursery) -> None:
        try:
            self._context.run(nursery.start_soon, self._go)
        except RuntimeError:  # the nursery is closed
            self._error = ended()
            self._turn.release()

    async def _go(self) -> None:
        try:
            with self._scope:
                self._value = await self._fn(*self._args)
        except BaseException as error:  # noqa: BLE001 (it belongs to the thread that waits)
            outcome, cancelled = _parted(error)
            self._error = outcome or ScopeCancelled(
                "given up: the scope or cluster around this code is ending; leave its `with` to see why"
            )
            if cancelled is not None:
                raise cancelled from None
        finally:
            self._turn.release()


def _parted(error: BaseException) -> tuple[BaseException | None, BaseException | None]:
    """What is owed to a thread, and Trio's own cancellation, which must go on up."""
    if isinstance(error, trio.Cancelled):
        return None, error
    if isinstance(error, BaseExceptionGroup):
        cancelled, rest = error.split(trio.Cancelled)
        return rest, cancelled
    return error, None


def ended() -> ChannelClosed:
    return ChannelClosed("the cluster connection of this handle has ended: open a cluster again", reason="closed")


# `async with` for a `with` -------------------------------------------------------------------------------------------


class BlockingContext(Generic[T]):
    """An ``async with`` block that a thread keeps open: `enter`, then `leave` with the error of its body, or None."""

    def __init__(self, portal: Portal, manager: AbstractAsyncContextManager[T]) -> None:
        self.portal = portal
        self.nursery: trio.Nursery | None = None
        """While it is open: the tasks that work for the body."""
        self.outcome: BaseException | None = None
        self.over = False
        self._manager = manager
        self._value: T | None = None
        self._error: BaseException | None = None
        self._leaving: trio.Event | None = None
        self._scope = trio.CancelScope()
        self._entered, self._left = threading.Lock(), threading.Lock()
        self._before: BlockingContext[Any] | None = None

    def enter(self, *, around_body: bool = True) -> T:
        """Enter it and return its value. Raises what entering raises.

        ``around_body``: from here until `leave`, what this thread waits for is given up when the block is cancelled.
        """
        refuse_in_loop("entering this waits")
        for lock in (self._entered, self._left):
            lock.acquire()
        around = copy_context()
        if self.portal.runtime is not None:
            around.run(set_current, self.portal.runtime)
        self.portal.send(self._begin, around, self.portal._place())
        try:
            self._entered.acquire()
        except BaseException as interrupt:
            self.portal.send(self._scope.cancel)
            self.leave(interrupt)
            raise
        if self.outcome is not None:
            raise self.outcome
        if around_body:
            self._before = _innermost.get()
            _innermost.set(self)
        return self._value  # type: ignore[return-value]

    def leave(self, error: BaseException | None = None) -> None:
        """Leave it, the body having raised ``error``; once it is left, do nothing.

        Raises:
            BaseException: what leaving raises; not ``error`` itself, which is the caller's to raise again.
        """
        if _innermost.get() is self:
            _innermost.set(self._before)
        refuse_in_loop("leaving this waits")
        try:
            self.portal.send(self._begin_leaving, error)
        except ChannelClosed:
            pass  # the loop has ended, and this with it
        with self._left:
            pass
        outcome, self.outcome = self.outcome, None
        if outcome is not None and outcome is not error:
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
                    await self._stay()
        except BaseException as error:  # noqa: BLE001 (it belongs to the thread that leaves)
            outcome, cancelled = _parted(error)
            self._end(outcome or ScopeCancelled("given up: the cluster of this block has ended"))
            if cancelled is not None:
                raise cancelled from None
        else:
            self._end(None)

    async def _stay(self) -> None:
        assert self._leaving is not None
        async with trio.open_nursery() as self.nursery:
            self._entered.release()
            await self._leaving.wait()
            self.nursery.cancel_scope.cancel()
        self.nursery = None
        if self._error is not None:
            raise self._error

    def _end(self, outcome: BaseException | None) -> None:
        self.outcome, self.over = outcome, True
        for lock in (self._entered, self._left):
            if lock.locked():
                lock.release()


_innermost: ContextVar[BlockingContext[Any] | None] = ContextVar("fray_blocking_held", default=None)
