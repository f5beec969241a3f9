"""Thread that owns an engine: takes commands between two decoding steps, and sends what happened to the loop."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

import trio

from fray.rl.inference.decoding import Decoder, DecodingEngine, DecodingOutcome

Command: TypeAlias = Callable[[Decoder], None]
"""Work of the thread between two steps."""

UNREAD_LIMIT = 64
"""Outcomes that the loop has not taken yet; the thread waits for it then."""
LOOP_POLL_S = 1.0
"""Seconds after which a thread that waits for the loop looks whether it shall end."""

log = logging.getLogger("fray.rl.inference")


class DecodingThread:
    """Daemon thread with an engine. All methods are for the loop that made it.

    Args:
        make_engine: makes the engine, in the thread.
        name: of the thread.
        on_outcome: called in the loop with what happened.
        on_end: called in the loop when the thread has ended: with the error that ended it, or None after `stop`.
    """

    def __init__(
        self,
        make_engine: Callable[[], DecodingEngine],
        name: str,
        on_outcome: Callable[[DecodingOutcome], None],
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        self._make_engine, self._on_outcome, self._on_end = make_engine, on_outcome, on_end
        self._token = trio.lowlevel.current_trio_token()
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._room = threading.Semaphore(UNREAD_LIMIT)
        self._stopping = threading.Event()
        self.ready, self.ended = trio.Event(), trio.Event()
        """``ready``: the engine is made. ``ended``: the thread does nothing any more."""
        self.decoder: Decoder | None = None
        """Decoder, whose counters may be read in the loop; None before `ready`."""
        self._start(name)

    def _start(self, name: str) -> None:
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def send(self, command: Command) -> None:
        """Run a command in the thread, after those sent before and before the next step."""
        self._commands.put(command)

    def call_soon(self, call: Callable[[], None]) -> None:
        """Call something in the loop; for commands, in the thread."""
        try:
            self._token.run_sync_soon(call)
        except trio.RunFinishedError:
            self._stopping.set()

    def stop(self) -> None:
        """Request the end, after the step that runs."""
        self._stopping.set()
        self._commands.put(None)

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            decoder = Decoder(self._make_engine(), time.monotonic)
            self.call_soon(lambda: self._begin(decoder))
            while not self._stopping.is_set():
                self._turn(decoder)
        # It fails the server and its requests, which are in the loop.
        except BaseException as caught:  # noqa: BLE001
            error = caught
        self.call_soon(lambda: self._finish(error))

    def _begin(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.ready.set()

    def _finish(self, error: BaseException | None) -> None:
        self.ended.set()
        self.ready.set()
        self._on_end(error)

    def _turn(self, decoder: Decoder) -> None:
        """Run waiting commands, or wait for one if there is nothing to decode; then do one step."""
        if not decoder.can_step:
            self._do(decoder, self._commands.get())
        while not self._commands.empty():
            self._do(decoder, self._commands.get())
        if decoder.can_step and not self._stopping.is_set():
            decoder.step()
        outcome = decoder.take_outcome()
        if outcome is not None:
            self._deliver(outcome)

    def _do(self, decoder: Decoder, command: Command | None) -> None:
        if command is not None:
            command(decoder)

    def _deliver(self, outcome: DecodingOutcome) -> None:
        while not self._room.acquire(timeout=LOOP_POLL_S):
            if self._stopping.is_set():
                return
        self.call_soon(lambda: self._take(outcome))

    def _take(self, outcome: DecodingOutcome) -> None:
        self._room.release()
        self._on_outcome(outcome)
