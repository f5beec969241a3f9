"""Answers to requests of the controller, beside the desired state.

Invariants: a request is queued at once and answered by one of a few tasks, so that many readers of old logs delay
neither the node nor one another for long; requests beyond the queue's limit are refused.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import trio

from fray.errors import ChannelClosed, ChannelFull, FrayError, ProtocolMismatch
from fray.model.messages.node import Probe, ProbeResult, ReadLog
from fray.net.channel.public import Channel
from fray.net.codec import decode_message
from fray.net.transport import Bytes
from fray.node.logs.store import AttemptLogs

TASKS = 4
LINE_LIMIT = 1_000
"""Requests that may wait."""

log = logging.getLogger("fray.node")


class ControllerRequests:
    """Queue of requests of one membership."""

    def __init__(self, logs: AttemptLogs, probe: Callable[[], Awaitable[str]]) -> None:
        self._logs, self._probe = logs, probe
        self._in, self._out = trio.open_memory_channel[tuple[int, object]](LINE_LIMIT)
        self._channel: Channel | None = None

    def on_request(self, ref: int, body: Bytes) -> None:
        """Queue a request; called by the channel's handler."""
        try:
            self._in.send_nowait((ref, decode_message(body)[0]))
        except trio.WouldBlock:
            self._fail(
                ref,
                ChannelFull(
                    f"node overloaded: {LINE_LIMIT} requests pending (limit {LINE_LIMIT}); retry later",
                    limit=LINE_LIMIT,
                ),
            )
        except ProtocolMismatch as error:
            self._fail(ref, error)

    async def run(self, channel: Channel) -> None:
        """Answer until cancelled."""
        self._channel = channel
        async with trio.open_nursery() as nursery:
            for _ in range(TASKS):
                nursery.start_soon(self._answer_all)

    async def _answer_all(self) -> None:
        async for ref, message in self._out.clone():
            try:
                await self._answer(ref, message)
            except FrayError as error:
                self._fail(ref, error)
            except OSError as error:
                self._fail(ref, FrayError(f"the node cannot read the log: {error}"))
            except Exception as error:
                log.exception("request %s failed", type(message).__name__)  # a failed request must not end the node
                self._fail(ref, FrayError(f"request failed on the node: {error!r}; see its log"))

    async def _answer(self, ref: int, message: object) -> None:
        reply: object
        if isinstance(message, ReadLog):
            reply, data = await self._logs.read(message)
        elif isinstance(message, Probe):
            reply, data = ProbeResult(trouble=await self._probe()), None
        else:
            raise ProtocolMismatch(f"unsupported request: {type(message).__name__}")
        if self._channel is not None:
            # Answers of up to 1 MiB each wait here while the controller reads slowly.
            await self._channel.wait_room()
            self._channel.reply(ref, reply, [data] if data is not None else [])

    def _fail(self, ref: int, error: FrayError) -> None:
        if self._channel is not None:
            try:
                self._channel.fail(ref, error)
            except (ChannelClosed, ChannelFull):
                pass  # the controller has gone, or repeats the request
