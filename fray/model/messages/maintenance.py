"""What operators ask of the controller about machines: to leave them out, to empty them, to have them again."""

from __future__ import annotations

from fray.model.ids import NodeName
from fray.model.messages.client import NodeInfo
from fray.model.word import frozen


@frozen(kw_only=True)
class CordonNodes:
    """Place nothing new on these machines; what runs there goes on, unless they are drained. All hosts of a TPU slice
    are one unit: one of them means all. Reply: `NodesMarked`, at once. Error: InvalidRequest, nothing was done.
    """

    nodes: tuple[NodeName, ...]
    reason: str = ""
    drain: bool = False
    """End what runs there, to begin elsewhere."""
    finish_s: float = 0.0
    """While draining: so long those are left alone that may end by themselves. Actors never do."""


@frozen(kw_only=True)
class UncordonNodes:
    """Use these machines again: neither cordoned nor drained nor in quarantine. Reply and error: as `CordonNodes`."""

    nodes: tuple[NodeName, ...]


@frozen(kw_only=True)
class NodesMarked:
    nodes: tuple[NodeInfo, ...]
    """All that it concerns, as they are now."""
    told: tuple[str, ...] = ()
    """What is worth a word about it."""
