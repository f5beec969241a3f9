"""Answer that stays open: server-sent events, until the page leaves or the source ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import trio

ALIVE_S = 10.0
"""Pause after which a page is sent a line without meaning, so that both sides notice a lost connection."""

WriteText: TypeAlias = Callable[[str], Awaitable[None]]
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-store")]


class EventStream:
    """ASGI answer of server-sent events.

    Args:
        produce: called with a function that sends the text of one event (empty: a sign of life); the stream ends when
            it returns, and it is cancelled when the page has left.
    """

    def __init__(self, produce: Callable[[WriteText], Awaitable[None]]) -> None:
        self._produce = produce

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request."""
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})

        async def write(text: str) -> None:
            body = f"data: {text}\n\n" if text else ": alive\n\n"
            await send({"type": "http.response.body", "body": body.encode(), "more_body": True})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_when_left, receive, nursery.cancel_scope)
            # At once: headers alone are not sent before there is a body.
            await write("")
            await self._produce(write)
            await send({"type": "http.response.body", "body": b""})
            nursery.cancel_scope.cancel()


async def _cancel_when_left(receive: Any, scope: trio.CancelScope) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    scope.cancel()
