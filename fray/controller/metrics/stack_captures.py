"""Stacks of running jobs: requests to nodes and their answers, within a timeout.

Invariants: every request is answered after `CAPTURE_TIMEOUT_S` at most, with a line for each node that was silent. The
scheduler is not involved.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import trio
from attrs import define, field

from fray.errors import ChannelFull
from fray.model.ids import AttemptId, JobId, NodeName
from fray.model.messages.node import CaptureRequest, StackCapture
from fray.model.monitoring.attempt_metrics import STACKS_LIMIT_BYTES
from fray.scheduler.state.state import State
from fray.scheduler.views import job_info

CAPTURE_TIMEOUT_S = 20.0
"""Longer than a node may take (four at a time, each up to 10 s), unless all of it is stuck."""
CAPTURES_LIMIT = 100
"""Captures in progress at a time."""
REPLY_LIMIT_BYTES = 4 * 1024 * 1024
"""Stacks of one answer; each attempt has an equal share."""

AskNode = Callable[[NodeName, CaptureRequest], bool]
"""Sends the request to a node; returns False if it is not connected."""


@define(eq=False)
class _CaptureRequest:
    waiting: dict[AttemptId, NodeName]
    order: list[AttemptId]
    texts: dict[AttemptId, str] = field(factory=dict)
    done: trio.Event = field(factory=trio.Event)

    def take(self, attempt_id: AttemptId, text: str) -> None:
        if self.waiting.pop(attempt_id, None) is not None:
            self.texts[attempt_id] = text
        if not self.waiting:
            self.done.set()


class StackCaptures:
    """Captures in progress."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._requests: dict[int, _CaptureRequest] = {}
        self._last = 0

    def start(self, job_id: JobId, ask_node: AskNode) -> int:
        """Request the stacks of all living attempts; `answer` waits for the result.

        Raises:
            NoSuchJob: the job is unknown.
            ChannelFull: too many captures are in progress.
        """
        job_info(self._state, job_id)
        if len(self._requests) >= CAPTURES_LIMIT:
            raise ChannelFull(
                f"too many stack captures in progress (limit {CAPTURES_LIMIT}); retry later", limit=CAPTURES_LIMIT
            )
        living = self._state.living_members(self._state.jobs[job_id])
        waiting = {attempt.attempt_id: attempt.node for attempt in living}
        request = _CaptureRequest(waiting, list(waiting))
        self._last += 1
        self._requests[self._last] = request
        # Divided in advance: each node cuts by itself, and the sum fits into one reply.
        limit_bytes = min(STACKS_LIMIT_BYTES, REPLY_LIMIT_BYTES // max(1, len(request.waiting)))
        self._ask_all(self._last, request, limit_bytes, ask_node)
        return self._last

    def _ask_all(self, ref: int, request: _CaptureRequest, limit_bytes: int, ask_node: AskNode) -> None:
        of_node: dict[NodeName, list[AttemptId]] = {}
        for attempt_id, node in request.waiting.items():
            of_node.setdefault(node, []).append(attempt_id)
        for node, attempts in of_node.items():
            if not ask_node(node, CaptureRequest(ref=ref, attempts=tuple(attempts), limit_bytes=limit_bytes)):
                for attempt_id in attempts:
                    request.take(attempt_id, f"[fray] node {node} cannot be reached now")
        if not request.waiting:
            request.done.set()

    def on_capture(self, node: NodeName, message: StackCapture) -> None:
        """Take the answer of a node."""
        request = self._requests.get(message.ref)
        # A late answer, or one from a node that does not run the attempt, changes nothing.
        if request is not None and request.waiting.get(message.attempt_id) == node:
            request.take(message.attempt_id, message.text)

    async def answer(self, ref: int) -> Mapping[AttemptId, str]:
        """Return all texts, in the order of the members."""
        request = self._requests[ref]
        with trio.move_on_after(CAPTURE_TIMEOUT_S):
            await request.done.wait()
        del self._requests[ref]
        for attempt_id, node in list(request.waiting.items()):
            request.take(attempt_id, f"[fray] node {node} did not answer within {CAPTURE_TIMEOUT_S:g} s")
        return {attempt_id: request.texts[attempt_id] for attempt_id in request.order}
