"""Lines that a node pushes to the controller as they come, while somebody follows.

Law: lines are pushed while there is room, and are on the disk in any case. Of those that were not pushed, how far the
log goes is said later, so that whoever wants them asks for them.
"""

from __future__ import annotations

import trio

from fray.errors import ChannelClosed, ChannelFull
from fray.model.ids import AttemptId
from fray.model.log_records import LogChunk
from fray.model.messages.node import AttemptLog
from fray.net.channel.public import Channel

LIVE_LIMIT_BYTES = 1024 * 1024
"""Lines are not pushed while more than this waits for the controller: they are on the disk, and can be asked for."""
PUSHED_LIMIT_BYTES = 64 * 1024
"""So much waits at most when lines that were not pushed are spoken of again."""


class LogPusher:
    """What the controller has been message of the logs of one node."""

    def __init__(self) -> None:
        self._unpushed: dict[AttemptId, int] = {}
        """How far the logs go of which the controller has not been message the end."""
        self._ends: dict[AttemptId, int] = {}
        self._wake = trio.Event()

    def __repr__(self) -> str:
        return f"<Pushed: {len(self._ends)} logs, of {len(self._unpushed)} not to their end>"

    def push(self, channel: Channel | None, attempt_id: AttemptId, chunk: LogChunk) -> None:
        """Tell of these lines, unless too much waits already."""
        self._ends[attempt_id] = chunk.end
        if channel is None or not channel.connected or channel.outbox.size_bytes > LIVE_LIMIT_BYTES:
            self._unpushed[attempt_id] = chunk.end
            self._wake.set()
            return
        self._unpushed.pop(attempt_id, None)
        self._send(channel, attempt_id, chunk)

    def push_end(self, channel: Channel, attempt_id: AttemptId, *, followed: bool) -> None:
        """Before the attempt's end is message: how far its log goes, and that it goes no further."""
        end = self._ends.get(attempt_id, 0)
        self._unpushed.pop(attempt_id, None)
        if followed:
            self._send(channel, attempt_id, LogChunk(end, end), over=True)

    async def run(self, channel: Channel) -> None:
        """Say how far the logs go whose last lines were not pushed, when there is room; until the channel has ended."""
        try:
            while channel.error is None:
                await self._wake.wait()
                self._wake = trio.Event()
                for attempt_id in list(self._unpushed):  # once each: a channel that is closing takes none
                    await channel.wait_room(PUSHED_LIMIT_BYTES)
                    end = self._unpushed.pop(attempt_id, None)
                    if end is not None:
                        self._send(channel, attempt_id, LogChunk(end, end))
        except ChannelClosed:
            pass

    def forget(self, attempt_id: AttemptId) -> None:
        self._unpushed.pop(attempt_id, None)
        self._ends.pop(attempt_id, None)

    def _send(self, channel: Channel, attempt_id: AttemptId, chunk: LogChunk, *, over: bool = False) -> None:
        message = AttemptLog(attempt_id=attempt_id, first=chunk.first, end=chunk.end, ended=over)
        try:
            channel.notice(message, [chunk.data] if chunk.data else ())
        except (ChannelClosed, ChannelFull):
            self._unpushed[attempt_id] = chunk.end
