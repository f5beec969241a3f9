"""What one node is told about itself. Pure."""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, field, frozen

from fray.model.ids import NodeName
from fray.model.messages.client import ProcessMark
from fray.model.resources import Capacity

LEASE_MIN_S = 240.0
"""A shorter lease leaves a node no time to end what it runs before it is placed elsewhere."""
NOTICE_MARGIN_S = 120.0
"""Both ends notice a loss at different times (up to 80 s apart, by heartbeats), and ending attempts takes time too."""


class PidNamespaceMode(StrEnum):
    """Which attempts have a PID namespace of their own."""

    AUTO = "auto"
    """Programs, where the system allows it; Python code keeps the machine's numbers."""
    ON = "on"
    """Every attempt; a node that cannot give them does not start."""
    OFF = "off"


class MemoryLimitMode(StrEnum):
    """How attempts are held to the memory they asked for."""

    AUTO = "auto"
    """By control groups, which the kernel enforces, where the node may make them; else as WATCH."""
    WATCH = "watch"
    """By looking at what their processes have."""
    OFF = "off"


@frozen(kw_only=True)
class LogRules:
    """What a node keeps of what its attempts print."""

    attempt_bytes: int = 256 * 1024 * 1024
    """Of one attempt; its oldest lines go."""
    total_bytes: int = 10 * 1024 * 1024 * 1024
    """Of all attempts; those that ended first go."""
    age_s: float = 7 * 86_400.0
    """So long after its last line, the log of an attempt that has ended goes."""
    archive: str = ""
    """Address of a directory, as fsspec knows them, where logs are copied to. Empty: nowhere."""


@frozen(kw_only=True)
class EnvironmentLimits:
    """Of the environments that all nodes of a machine share.

    Attributes:
        size_bytes: the longest unused are removed while all together are larger. Default 50 GiB.
        keep_s: one that was not used for so long is removed. Default 14 days.
        build_s: a build that takes longer fails. Default 30 minutes.
    """

    size_bytes: int = 50 * 1024**3
    keep_s: float = 14 * 24 * 3600.0
    build_s: float = 1800.0


@frozen(kw_only=True)
class NodeConfig:
    """Configuration of one node, as `fray-node` makes it or an embedded cluster hands it over."""

    name: NodeName
    controller: str
    """Address of the controller, as `fray.net` writes it; jobs dial it too."""
    token: str = field(repr=False)
    capacity: Capacity
    state_dir: str
    """Its own directory; ignored by launchers without processes."""
    join_token: str = field(default="", repr=False)
    """In place of ``token``: lets this machine join once (`fray.node.joining`)."""
    parent_pid: int | None = None
    """The node ends, with all it runs, when this process does."""
    advertise: str = "127.0.0.1"
    """Host or IP under which peers reach what listens here."""
    networked: bool = False
    """Jobs of this node may listen for other machines."""
    cache_dir: str = ""
    """Shared by all nodes of this machine and user: what can be had again. Default: ``~/.cache/fray``."""
    lease_s: float = 600.0
    """After this much silence the controller places the node's attempts elsewhere."""
    secrets_dir: str = ""
    """See `fray.node.secrets`; empty: this node knows none."""
    pid_namespace: PidNamespaceMode = PidNamespaceMode.AUTO
    """Which attempts have a PID namespace."""
    memory_limit: MemoryLimitMode = MemoryLimitMode.AUTO
    """How attempts are held to the memory they asked for."""
    logs: LogRules = Factory(LogRules)
    environments: EnvironmentLimits = Factory(EnvironmentLimits)
    boot_id: str = ""
    process: ProcessMark | None = None
    detected_devices: tuple[str, ...] = ()
    """Of the devices of its capacity, those that were detected_devices here and are not only said to be."""
    drain_s: float = 0.0
    """Asked to leave, it lets jobs finish for so long that may end by themselves."""

    @property
    def patience_s(self) -> float:
        """How long a node without a controller keeps its attempts: certainly less than the controller waits."""
        return max(self.lease_s / 2, self.lease_s - NOTICE_MARGIN_S)
