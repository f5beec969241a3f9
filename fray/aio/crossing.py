"""Crossing from an asyncio loop to Fray's loop and back, through the portal of sync code.

Rules: cancelling the asyncio task cancels what it waits for in Fray's loop, and waits for the end of that, at most
`INTERRUPTED_WAIT_S`. When a block ends by itself, as a scope does whose child has failed, its body is cancelled. Both
use cancel scopes of AnyIO, which hold also where AnyIO cancels again and again, as in handlers of Starlette and
FastAPI.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import anyio

from fray.blocking.bridge.portal import INTERRUPTED_WAIT_S, HeldContext, LoopRequest, Portal
from fray.errors import FrayError
from fray.runtime.notebook_cells import is_notebook

T = TypeVar("T")

NOTICE_INTERRUPT_S = 0.5
"""Seconds within which the loop of a notebook runs what the handler of SIGINT has scheduled."""

_woken_loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


def notice_interrupts(loop: asyncio.AbstractEventLoop) -> None:
    """Wake the loop every `NOTICE_INTERRUPT_S` until it is closed, if this is a notebook; once for each loop."""
    # The kernel's handler of SIGINT schedules the cancellation of the cell by `call_soon`, which does not wake the
    # loop: in a cell that waits and prints nothing, the interrupt has an effect only with the next event. As long as
    # the loop, and not only while a call of `fray.aio` waits: cells await futures of Fray as well.
    if not is_notebook() or loop in _woken_loops:
        return
    _woken_loops.add(loop)

    def wake() -> None:
        loop.call_later(NOTICE_INTERRUPT_S, wake)

    wake()


class AsyncioTurn:
    """Wait of asyncio code for Fray's loop, which releases it from its own thread.

    Raises:
        FrayError: no asyncio loop runs here.
    """

    def __init__(self) -> None:
        try:
            self._loop = asyncio.get_running_loop()
        except RuntimeError:
            raise FrayError(
                "no asyncio loop runs here, and fray.aio is for asyncio: on Trio write "
                "`async with fray.open_cluster(...) as cluster:`, in sync code "
                "`with fray.blocking.open_cluster(...) as cluster:`"
            ) from None
        self._released = asyncio.Event()
        notice_interrupts(self._loop)

    def locked(self) -> bool:
        """Return whether it has not been released."""
        return not self._released.is_set()

    def release(self) -> None:
        """End the wait; on any thread."""
        self.call_soon(self._released.set)

    def call_soon(self, fn: Callable[[], object]) -> None:
        """Call ``fn`` in the asyncio loop; on any thread."""
        with suppress(RuntimeError):  # that loop has been closed, and nothing waits in it any more
            self._loop.call_soon_threadsafe(fn)

    async def wait(self) -> None:
        """Wait for the release."""
        await self._released.wait()

    async def wait_shielded(self) -> None:
        """Wait for the release although the task has been cancelled, at most `INTERRUPTED_WAIT_S`."""
        with anyio.move_on_after(INTERRUPTED_WAIT_S, shield=True):
            await self._released.wait()


async def call(portal: Portal, fn: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Await ``fn(*args)`` in Fray's loop; return or raise its outcome. Raises as `Portal.call`."""
    turn = AsyncioTurn()
    request: LoopRequest[T] = LoopRequest(portal, fn, args, turn)
    request.send()
    try:
        await turn.wait()
    except asyncio.CancelledError:
        with suppress(FrayError):  # the loop has ended by itself
            request.cancel()
            await turn.wait_shielded()
        raise
    return request.outcome()


class Block(Generic[T]):
    """``async with`` block of Fray's loop around a body in asyncio. If it ends by itself, the body is cancelled, and
    leaving it raises the reason.

    Args:
        find_portal: called when it is entered.
        wrap: makes the value for asyncio code.
        on_leave: called when leaving begins.
    """

    def __init__(
        self,
        find_portal: Callable[[], Portal],
        manager: AbstractAsyncContextManager[Any],
        wrap: Callable[[Any], T],
        on_leave: Callable[[], object] = lambda: None,
    ) -> None:
        self._find_portal, self._manager, self._wrap, self._on_leave = find_portal, manager, wrap, on_leave
        self._has_body = False

    async def __aenter__(self) -> T:
        entered, self._left = AsyncioTurn(), AsyncioTurn()
        self._body = anyio.CancelScope()
        self._held: HeldContext[Any] = HeldContext(
            self._find_portal(), self._manager, entered, self._left, lambda: entered.call_soon(self._cancel_body)
        )
        self._held.begin_entering()
        try:
            await entered.wait()
        except asyncio.CancelledError:
            self._held.begin_leaving(cancel=True)
            await self._left.wait_shielded()
            raise
        value = self._wrap(self._held.value())
        self._body.__enter__()
        self._has_body = True
        return value

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._has_body = False
        if self._body.__exit__(kind, error, traceback):
            error = None  # the cancellation of the body by this block, whose reason is raised below
        self._on_leave()
        # A cancellation belongs to asyncio: Fray's loop gets its own.
        is_cancelled = error is not None and not isinstance(error, Exception)
        self._held.begin_leaving(None if is_cancelled else error, cancel=is_cancelled)
        if is_cancelled:
            await self._left.wait_shielded()
            return
        try:
            await self._left.wait()
        except asyncio.CancelledError:
            self._held.begin_leaving(cancel=True)
            await self._left.wait_shielded()
            raise
        self._held.raise_outcome(error)

    def _cancel_body(self) -> None:
        if self._has_body:
            self._body.cancel()

    if not TYPE_CHECKING:  # type checkers find these mistakes themselves

        def __enter__(self) -> NoReturn:
            type(self._manager).__enter__(self._manager)

        def __exit__(self, *error: object) -> None:
            """Exist because Python looks for it before it calls `__enter__`."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("_"):
                raise AttributeError(name)
            return getattr(self._manager, name)  # raises an error that says how to enter it
