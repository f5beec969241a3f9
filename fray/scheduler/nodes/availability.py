"""Whether a machine is in service, in a word and in a sentence."""

from __future__ import annotations

from fray.scheduler.lifecycle import NodePhase
from fray.scheduler.state.rows import Cordon, Node, Quarantine

SHOWN = 4


def service_state(node: Node) -> str:
    """``cordoned``, ``draining``, ``drained``, ``leaving`` or ``quarantined``; empty: nothing is said against it."""
    if node.cordon is None and node.is_leaving:
        return "leaving"
    if node.cordon is None:
        return "quarantined" if node.quarantine is not None else ""
    if node.cordon.is_node_leaving:
        return "leaving"
    if not node.cordon.drain:
        return "cordoned"
    return "draining" if node.cordon.drained_at is None else "drained"


def availability_text(node: Node) -> str:
    """The same, also of one that nobody has taken out of service: ``silent``, ``not ready yet``."""
    if node.phase is not NodePhase.ALIVE:
        return "silent"
    return service_state(node) or "not ready yet"


def out_of_service_text(node: Node, now: float) -> str:
    """Who or what has taken it out of service, and why; empty: it is not."""
    if node.cordon is not None:
        return _cordoned(node, node.cordon, now)
    if node.is_leaving:
        return "is being given back to its provider"
    return _suspected(node.quarantine, now) if node.quarantine is not None else ""


def _suspected(found: Quarantine, now: float) -> str:
    last = f"; its last probe said: {found.probe_message}" if found.probe_message else ""
    if found.probe_at is not None:
        return f"is in quarantine ({found.reason}){last}; it is probed in {max(0.0, found.probe_at - now):.0f} s"
    return f"is in quarantine ({found.reason}){last}; it is being probed"


def _cordoned(node: Node, cordon: Cordon, now: float) -> str:
    if cordon.is_node_leaving:
        return f"is leaving: {cordon.reason}"
    said = f" ({cordon.reason})" if cordon.reason else ""
    until = ""
    if cordon.until is not None:
        until = f"; what ends by itself has {max(0.0, cordon.until - now):.0f} s left"
    doing = "being drained" if service_state(node) == "draining" else service_state(node)
    return f"is {doing} by {cordon.by}{said}{until}"


def closed_text(node: Node, now: float) -> str:
    """Why nothing is placed on it, whatever it has free: the beginning of that sentence is its name."""
    if node.phase is not NodePhase.ALIVE:
        return f"has been silent for {now - node.silent_since:.0f} s"
    if out := out_of_service_text(node, now):
        return out
    if node.is_leaving:
        return "is being given back to its provider"
    if node.stray_attempts:
        return f"is still ending {', '.join(node.stray_attempts[:SHOWN])}"
    return "has not yet told what it holds"
