"""Inference servers whose link to their callers can be cut, while they answer the health check of their node."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import trio
from attrs import define, evolve, frozen

from fray.net.transports.websocket_transport import WebSocketTransport
from fray.rl.inference.decoding import DecodingEngine
from fray.rl.inference.requests import Completion
from fray.rl.inference.server import InferenceServer

CHECK_S = 0.01
CLEANUP_S = 0.5
"""Time for which the process of a server outlives its termination, so that it can still send."""
MARK = -99.0
"""Logprob of each token that is made after the cut."""


@frozen
class CutEngine:
    """Maker of the engine of a server. The process of the server loses its callers while there is a file ``cut-PID``.

    Its connections of callers are then dead, and new ones too: nothing is read or sent, and nothing closed. When the
    file is removed they work again, and ``late-PID`` says that something was sent.
    """

    make_engine: Callable[[], DecodingEngine]
    directory: Path

    def __call__(self) -> DecodingEngine:
        link = _Link(self.directory / f"cut-{os.getpid()}", self.directory / f"late-{os.getpid()}")
        _hold_messages(link)
        _end_later()
        engine: Any = self.make_engine()
        step = engine.step

        def marked_step() -> Sequence[Any]:
            events = step()
            return [_marked(event) for event in events] if link.is_cut or link.was_cut else events

        engine.step = marked_step
        return engine  # type: ignore[no-any-return]


@define
class _Link:
    cut: Path
    late: Path
    was_cut: bool = False

    @property
    def is_cut(self) -> bool:
        found = self.cut.exists()
        self.was_cut = self.was_cut or found
        return found


def _marked(event: Any) -> Any:
    if isinstance(event, tuple) and isinstance(event[1], Completion):
        return event[0], evolve(event[1], logprobs=[MARK] * len(event[1].logprobs))
    return event


def _end_later() -> None:
    server: Any = InferenceServer
    cleanup = server.__fray_cleanup__

    async def later(self: Any) -> None:
        await trio.sleep(CLEANUP_S)
        await cleanup(self)

    server.__fray_cleanup__ = later


def _hold_messages(link: _Link) -> None:
    transport: Any = WebSocketTransport
    push, push_all, receive = transport._push, transport._push_all, transport.receive
    send_control = transport._send_control

    def is_of_caller(self: Any) -> bool:
        return str(self._sock.getsockname()).endswith("calls.sock")

    async def wait(self: Any) -> None:
        while link.is_cut and is_of_caller(self):  # noqa: ASYNC110 - another process removes the file
            await trio.sleep(CHECK_S)

    def push_or_hold(self: Any, views: list[Any]) -> bool:
        if is_of_caller(self):
            if link.is_cut:
                return False
            if link.was_cut:
                link.late.touch()
        return bool(push(self, views))

    async def push_all_later(self: Any, views: list[Any]) -> None:
        await wait(self)
        await push_all(self, views)

    async def receive_later(self: Any) -> Any:
        message = await receive(self)
        await wait(self)
        return message

    def control_or_drop(self: Any, frame: bytes) -> bool:
        return not (is_of_caller(self) and link.is_cut) and bool(send_control(self, frame))

    transport._push, transport._push_all, transport.receive = push_or_hold, push_all_later, receive_later
    transport._send_control = control_or_drop
