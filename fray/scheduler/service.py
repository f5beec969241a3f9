"""Whether a machine is in service, in a word and in a sentence."""

from __future__ import annotations

from fray.scheduler.rows import Cordon, Node, NodePhase

SHOWN = 4


def standing(node: Node) -> str:
    """``cordoned``, ``draining``, ``drained`` or ``leaving``; empty: nobody has said anything against it."""
    if node.cordon is None:
        return ""
    if node.cordon.leaving:
        return "leaving"
    if not node.cordon.drain:
        return "cordoned"
    return "draining" if node.cordon.drained_at is None else "drained"


def why_out(node: Node, now: float) -> str:
    """Who has taken it out of service, and why; empty: nobody."""
    return _cordoned(node, node.cordon, now) if node.cordon is not None else ""


def _cordoned(node: Node, cordon: Cordon, now: float) -> str:
    if cordon.leaving:
        return f"is leaving: {cordon.reason}"
    said = f" ({cordon.reason})" if cordon.reason else ""
    until = ""
    if cordon.until is not None:
        until = f"; what ends by itself has {max(0.0, cordon.until - now):.0f} s left"
    doing = "being drained" if standing(node) == "draining" else standing(node)
    return f"is {doing} by {cordon.by}{said}{until}"


def why_closed(node: Node, now: float) -> str:
    """Why nothing is placed on it, whatever it has free: the beginning of that sentence is its name."""
    if node.phase is not NodePhase.ALIVE:
        return f"has been silent for {now - node.silent_since:.0f} s"
    if out := why_out(node, now):
        return out
    if node.leaving:
        return "is being given back to its provider"
    if node.strays:
        return f"is still ending {', '.join(node.strays[:SHOWN])}"
    return "has not yet told what it holds"
