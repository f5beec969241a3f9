"""Daemons of the laboratory that lie: ``python -m tests.network.altered_daemon CHANGE OPTION...``.

Each change replaces one part of the real program, which then runs with its own options.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from fray.controller import main as controller
from fray.controller.connections import relay
from fray.model.specs import EndReason, ObservedAttempt, Outcome, Phase
from fray.net.codec import Bytes, blob_id
from fray.net.tls import certificates
from fray.node import main as node
from fray.node.state_reports import PendingReports

FORGED = b"forged"
CHANGED = "altered daemon: changed a part"
SHORT_LIFE_S = 12.0
"""Life of certificates of nodes and controller under ``short-certificates``."""
CHANGED_EVERY = 10
"""Distance of the parts that the relay changes under ``changes-relayed-bytes``."""


def change_relayed_bytes() -> None:
    """Let the relay change one bit of every tenth part of each direction of a tunnel."""
    original = relay.RelayEndpoint.on_data
    seen: dict[object, int] = {}

    def on_data(self: relay.RelayEndpoint, flags: int, body: Bytes) -> None:
        seen[self] = seen.get(self, 0) + 1
        if seen[self] % CHANGED_EVERY == 0:
            at = len(body) // 2
            body = bytes(body[:at]) + bytes([body[at] ^ 1]) + bytes(body[at + 1 :])
            print(CHANGED, file=sys.stderr, flush=True)
        original(self, flags, body)

    relay.RelayEndpoint.on_data = on_data  # type: ignore[method-assign]


def end_attempt_of_another(attempt_id: str) -> None:
    """Let the node report with each message that an attempt of another node has succeeded, with a value of its own."""
    original = PendingReports.next
    outcome = Outcome(cause=EndReason.SUCCEEDED, value=blob_id(FORGED))

    def next_report(self: PendingReports, busy: dict[str, str]) -> tuple[Any, list[bytes], list[Any]]:
        report, values, ended = original(self, busy)
        forged = ObservedAttempt(attempt_id=attempt_id, phase=Phase.ENDED, outcome=outcome)
        return (
            type(report)(
                full=report.full, observed=(*report.observed, forged), removed=report.removed, busy=report.busy
            ),
            [*values, FORGED],
            ended,
        )

    PendingReports.next = next_report  # type: ignore[method-assign]
    PendingReports.has_report = lambda self, busy: True  # type: ignore[method-assign]


def shorten_certificates() -> None:
    """Let the controller issue certificates, also its own, for `SHORT_LIFE_S` only."""
    certificates.issue_node = partial(certificates.issue_node, life_s=SHORT_LIFE_S)  # type: ignore[assignment]
    certificates.issue_controller = partial(  # type: ignore[assignment]
        certificates.issue_controller, life_s=SHORT_LIFE_S
    )


CHANGES: dict[str, tuple[Callable[..., None], Callable[[list[str]], int]]] = {
    "changes-relayed-bytes": (change_relayed_bytes, controller.main),
    "ends-attempt-of-another": (end_attempt_of_another, node.main),
    "short-certificates": (shorten_certificates, controller.main),
}


def main(argv: list[str]) -> int:
    """Apply the change named first (with what follows a colon), and run its daemon with the other arguments."""
    name, _, argument = argv[0].partition("=")
    change, run = CHANGES[name]
    change(*([argument] if argument else []))
    return run(argv[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
