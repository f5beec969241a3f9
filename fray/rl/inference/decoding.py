"""Work of a server between two decoding steps: begin requests, load weights, pause. Synchronous, for one thread.

Without Trio, threads and a clock of its own: `fray.rl.inference.decoding_thread` runs it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol, TypeAlias, get_args

from attrs import define, field, frozen

from fray.model.text import near_text
from fray.rl.core.versions import VersionName
from fray.rl.inference.requests import Completion, GenerateRequest, TokenEvent

InterruptMode: TypeAlias = Literal["keep", "wait", "abort"]
"""Treatment of requests in flight when weights are loaded or the server is paused.

``keep``: they continue afterwards, where they were; ``wait``: they finish first, and new ones wait; ``abort``: they end
with the finish reason "abort", and their callers send them again.
"""

Done: TypeAlias = Callable[[ValueError | None], None]
"""Reports that a command is done, or why it was refused."""

EngineEvent: TypeAlias = TokenEvent | tuple[str, Completion]
"""A token of a streamed request, or (request id, one of its completions)."""


class DecodingEngine(Protocol):
    """Engine that a server uses; `fray.rl.tensors` has the one for models. One thread calls it."""

    @property
    def version(self) -> VersionName:
        """Version of the weights that the next step uses."""

    @property
    def max_length(self) -> int:
        """Tokens of a prompt and a completion together."""

    @property
    def has_work(self) -> bool:
        """True while a request is in it."""

    def add(self, request: GenerateRequest, *, stream: bool = False) -> None:
        """Accept a request. Raises ValueError if it can never be answered, such as one that is too long."""

    def cancel(self, request_id: str) -> object:
        """End a request without an answer; one that is not in it is ignored."""

    def step(self) -> Sequence[EngineEvent]:
        """Do one decoding step for all requests."""

    def load(self, version: VersionName, table: Any, buffer: Any) -> None:
        """Replace the weights; without a table they stay, under this name.

        Raises:
            ValueError: the table is of another model; nothing is changed.
        """

    def abort_all(self) -> Sequence[EngineEvent] | None:
        """End all requests; their completions ("abort") are returned, or part of the next step."""


@frozen(eq=False)
class WeightUpdate:
    """Weights to load.

    Args:
        version: their name.
        table: places of the tensors in the buffer; None: the weights stay.
        buffer: the bytes; read in place.
        mode: what happens to requests in flight.
    """

    version: VersionName
    table: Any
    buffer: Any
    mode: InterruptMode = "keep"


@frozen
class DecodingOutcome:
    """Events of the engine since the last outcome.

    Attributes:
        events: of the engine, in order.
        refused: ids of requests that the engine did not accept, with the reason.
    """

    events: list[EngineEvent] = field(factory=list)
    refused: list[tuple[str, ValueError]] = field(factory=list)


def checked_mode(mode: str) -> InterruptMode:
    """Return the mode; raises ValueError with the nearest name."""
    if mode not in get_args(InterruptMode):
        raise ValueError(f"unknown mode {mode!r}{near_text(mode, get_args(InterruptMode))}; keep, wait or abort")
    return mode  # type: ignore[return-value]


@define
class Decoder:
    """An engine, and the requests and updates that wait for it.

    Args:
        engine: the engine; nothing else uses it.
        clock: seconds, for `busy_s`.
    """

    engine: DecodingEngine
    clock: Callable[[], float]
    steps: int = 0
    busy_s: float = 0.0
    """Seconds spent in decoding steps."""
    is_paused: bool = False
    running: dict[str, int] = field(factory=dict)
    """Requests in the engine: how many of their completions have not ended."""
    waiting: dict[str, tuple[GenerateRequest, bool]] = field(factory=dict)
    """Requests that wait for weights or for the end of a pause, and whether they are streamed."""
    _outcome: DecodingOutcome = field(factory=DecodingOutcome)
    _updates: deque[tuple[WeightUpdate, Done]] = field(factory=deque)
    _pauses: list[Done] = field(factory=list)
    """Called when the requests in flight have finished, and the server is paused."""

    # Commands, between two steps -------------------------------------------------------------------------------------

    def add(self, request: GenerateRequest, stream: bool) -> None:
        """Begin a request, or let it wait."""
        if self.is_paused or self._updates or self._pauses:
            self.waiting[request.request_id] = request, stream
        else:
            self._begin(request, stream)

    def cancel(self, request_id: str) -> None:
        """End a request of which nothing is wanted any more."""
        if self.waiting.pop(request_id, None) is None and self.running.pop(request_id, None) is not None:
            self.engine.cancel(request_id)
            self._advance()

    def update(self, update: WeightUpdate, done: Done) -> None:
        """Load weights as its mode says; then call ``done``, with the reason if they were refused."""
        if update.mode == "wait" and self.running and self.is_paused:
            count = len(self.running)
            done(
                ValueError(
                    f"version {update.version} cannot wait for the requests in flight ({count}): the server is paused. "
                    'Resume it first, or load with mode "keep" or "abort"'
                )
            )
            return
        if update.mode == "wait":
            self._updates.append((update, done))
            self._advance()
            return
        if update.mode == "abort" and self._refusal(update) is None:
            self._abort()
        done(self._load(update))
        self._advance()

    def pause(self, mode: InterruptMode, done: Done) -> None:
        """Stop decoding as the mode says; then call ``done(None)``. A server that is paused stays so."""
        if mode == "abort":
            self._abort()
        if mode == "wait" and self.running and not self.is_paused:
            self._pauses.append(done)
            return
        self.is_paused = True
        self._advance()
        done(None)

    def resume(self) -> None:
        """Decode again, and begin the requests that waited."""
        self.is_paused = False
        pauses, self._pauses = self._pauses, []
        for done in pauses:
            done(None)
        self._advance()

    def withdraw(self, done: Done) -> None:
        """Forget the update or pause with this ``done`` if it still waits for requests to finish; then call it."""
        waiting = [each for _, each in self._updates if each == done] + [each for each in self._pauses if each == done]
        self._updates = deque(each for each in self._updates if each[1] != done)
        self._pauses = [each for each in self._pauses if each != done]
        for ended in waiting:
            ended(None)
        self._advance()

    # Steps -----------------------------------------------------------------------------------------------------------

    @property
    def can_step(self) -> bool:
        """True if a step has something to do."""
        return bool(self.running) and not self.is_paused

    def step(self) -> None:
        """Do one decoding step."""
        began = self.clock()
        events = self.engine.step()
        self.busy_s += self.clock() - began
        self.steps += 1
        self._take(events)
        self._advance()

    def take_outcome(self) -> DecodingOutcome | None:
        """Return what happened since the last call; None if nothing did."""
        outcome = self._outcome
        if not outcome.events and not outcome.refused:
            return None
        self._outcome = DecodingOutcome()
        return outcome

    def _take(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            name = event.request_id if isinstance(event, TokenEvent) else event[0]
            # A request that was cancelled within the step may still have an event.
            if name not in self.running:
                continue
            self._outcome.events.append(event)
            if not isinstance(event, TokenEvent):
                self.running[name] -= 1
                if not self.running[name]:
                    del self.running[name]

    def _begin(self, request: GenerateRequest, stream: bool) -> None:
        try:
            self.engine.add(request, stream=stream)
        except ValueError as error:
            self._outcome.refused.append((request.request_id, error))
        else:
            self.running[request.request_id] = request.sampling.n

    def _advance(self) -> None:
        """Do what waited for requests to end: load, pause, begin those that were held back."""
        if not self.running:
            while self._updates:
                update, done = self._updates.popleft()
                done(self._load(update))
            if self._pauses:
                self.is_paused = True
                pauses, self._pauses = self._pauses, []
                for paused in pauses:
                    paused(None)
        if not (self.is_paused or self._updates or self._pauses):
            waiting, self.waiting = self.waiting, {}
            for request, stream in waiting.values():
                self._begin(request, stream)

    def _abort(self) -> None:
        self._take(self.engine.abort_all() or ())
        if self.running:
            self._take(self.engine.step())

    def _refusal(self, update: WeightUpdate) -> ValueError | None:
        """Return why weights must not be loaded: a message that was delayed must not take the server back."""
        if update.version < self.engine.version:
            return ValueError(f"version {update.version} is older than {self.engine.version}, which the server has")
        return None

    def _load(self, update: WeightUpdate) -> ValueError | None:
        refusal = self._refusal(update)
        if refusal is not None or update.version == self.engine.version:
            return refusal
        try:
            self.engine.load(update.version, update.table, update.buffer)
        except ValueError as error:
            return error
        # Tokens are named by this: an engine that did not take over the name must not decode.
        if self.engine.version != update.version:
            raise RuntimeError(f"the engine has version {self.engine.version} after loading {update.version}")
        return None
