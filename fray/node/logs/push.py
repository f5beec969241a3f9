"""Pusher of new lines to the controller.

Invariants: lines are pushed while there is room, and are on disk in any case. For lines that were not pushed, the end
of the log is sent later, so that followers request them.
"""

from __future__ import annotations

import trio

from fray.errors import ChannelClosed, ChannelFull
from fray.model.ids import AttemptId
from fray.model.log_records import LogChunk
from fray.model.messages.node import AttemptLog
from fray.net.channel.public import Channel

LIVE_LIMIT_BYTES = 1024 * 1024
"""Bytes waiting for the controller beyond which lines are not pushed; they can be requested later."""
PUSHED_LIMIT_BYTES = 64 * 1024
"""Bytes waiting for the controller up to which ends of logs are sent for lines that were not pushed."""


class LogPusher:
    """State of the logs of one node, as far as the controller knows it."""

    def __init__(self) -> None:
        self.channel: Channel | None = None
        self._unpushed: dict[AttemptId, int] = {}
        """End of each log whose end the controller does not know."""
        self._ends: dict[AttemptId, int] = {}
        self._wake = trio.Event()

    def __repr__(self) -> str:
        return f"<LogPusher: {len(self._ends)} logs, {len(self._unpushed)} not pushed to their end>"

    def adopt(self, attempt_id: AttemptId, end: int) -> None:
        """Note how far a log goes that was pushed by the program that ran in this process before, perhaps not to its
        end."""
        self._ends[attempt_id] = self._unpushed[attempt_id] = end
        self._wake.set()

    def push(self, attempt_id: AttemptId, chunk: LogChunk) -> None:
        """Send these lines, unless too much waits already."""
        channel = self.channel
        self._ends[attempt_id] = chunk.end
        # Logs must not delay what shares the channel: reports, health, tunnels. Followers read the rest from disk, page
        # by page.
        if channel is None or not channel.connected or channel.outbox.size_bytes > LIVE_LIMIT_BYTES:
            self._unpushed[attempt_id] = chunk.end
            self._wake.set()
            return
        self._unpushed.pop(attempt_id, None)
        self._send(channel, attempt_id, chunk)

    def push_end(self, channel: Channel, attempt_id: AttemptId) -> None:
        """Send, before the attempt's end is reported, how far its log goes and that it is complete."""
        # Remembered as long as the attempt is held: after a controller's restart the end is reported again, and a log
        # whose end is unknown would count as empty.
        end = self._ends.get(attempt_id, 0)
        self._unpushed.pop(attempt_id, None)
        self._send(channel, attempt_id, LogChunk(end, end), ended=True)

    async def run(self, channel: Channel) -> None:
        """Send the ends of logs whose last lines were not pushed when there is room, until the channel has ended."""
        try:
            while channel.error is None:
                await self._wake.wait()
                self._wake = trio.Event()
                for attempt_id in list(self._unpushed):  # once each: a closing channel accepts none
                    # A lower limit than for lines: a few bytes per log tell followers to read the rest.
                    await channel.wait_room(PUSHED_LIMIT_BYTES)
                    end = self._unpushed.pop(attempt_id, None)
                    if end is not None:
                        self._send(channel, attempt_id, LogChunk(end, end))
        except ChannelClosed:
            pass

    def forget(self, attempt_id: AttemptId) -> None:
        self._unpushed.pop(attempt_id, None)
        self._ends.pop(attempt_id, None)

    def _send(self, channel: Channel, attempt_id: AttemptId, chunk: LogChunk, *, ended: bool = False) -> None:
        message = AttemptLog(attempt_id=attempt_id, first=chunk.first, end=chunk.end, ended=ended)
        try:
            channel.notice(message, [chunk.data] if chunk.data else ())
        except (ChannelClosed, ChannelFull):
            self._unpushed[attempt_id] = chunk.end
