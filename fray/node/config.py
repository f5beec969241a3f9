"""Configuration of one node. Pure."""

from __future__ import annotations

from enum import StrEnum

from attrs import Factory, field, frozen

from fray.model.ids import NodeName
from fray.model.messages.client import ProcessMark
from fray.model.resources import Capacity

JOIN_VARIABLE = "FRAY_JOIN_TOKEN"
LEASE_MIN_S = 240.0
"""Shortest lease: a shorter one leaves a node no time to end its attempts before they are placed elsewhere."""
NOTICE_MARGIN_S = 120.0
"""Margin for noticing a loss at different times (up to 80 s apart, by heartbeats) and for ending attempts."""


class PidNamespaceMode(StrEnum):
    """Attempts that have a PID namespace of their own."""

    AUTO = "auto"
    """Programs, where the system permits it; Python code uses the machine's pids."""
    ON = "on"
    """Every attempt; a node that cannot create them does not start."""
    OFF = "off"


class MemoryLimitMode(StrEnum):
    """Enforcement of the memory that attempts requested."""

    AUTO = "auto"
    """Control groups, enforced by the kernel, where the node may create them; else as WATCH."""
    WATCH = "watch"
    """Sampling the memory of their processes."""
    OFF = "off"


@frozen(kw_only=True)
class LogRules:
    """Limits for the logs of attempts."""

    attempt_bytes: int = 256 * 1024 * 1024
    """Limit for one attempt; its oldest lines are removed."""
    total_bytes: int = 10 * 1024 * 1024 * 1024
    """Limit for all attempts; those that ended first are removed."""
    age_s: float = 7 * 86_400.0
    """Seconds after its last line when the log of an ended attempt is removed."""
    archive: str = ""
    """Address of a directory (fsspec) that logs are copied to. Empty: no archive."""


@frozen(kw_only=True)
class EnvironmentLimits:
    """Limits for the environments that all nodes of a machine share.

    Attributes:
        size_bytes: the longest unused are removed while the total is larger. Default 50 GiB.
        keep_s: an environment that was not used for so long is removed. Default 14 days.
        build_s: a build that takes longer fails. Default 30 minutes.
    """

    size_bytes: int = 50 * 1024**3
    keep_s: float = 14 * 24 * 3600.0
    build_s: float = 1800.0


@frozen(kw_only=True)
class NodeConfig:
    """Configuration of one node, made by `fray-node` or passed on by an embedded cluster."""

    name: NodeName
    controller: str
    """Address of the controller, as `fray.net` writes it; jobs dial it too."""
    token: str = field(repr=False)
    capacity: Capacity
    state_dir: str
    """Directory of this node alone; ignored by launchers without processes."""
    previous_token: str = field(default="", repr=False)
    """Token that counts as well while it is being replaced; empty: none."""
    token_file: str = ""
    """File of the tokens, which is read again for each dial; empty: they were given in another way."""
    join_token: str = field(default="", repr=False)
    """Token that lets this machine join once (`fray.node.joining`), instead of ``token``."""
    parent_pid: int | None = None
    """Process whose end ends the node with all it runs."""
    advertise: str = "127.0.0.1"
    """Host or IP address under which other machines reach what listens here."""
    finds_address: bool = False
    """True if ``advertise`` was not given: the address from which the controller sees this machine replaces it, with
    each connection, if it is the machine's own."""
    networked: bool = False
    """True if jobs of this node may listen for other machines."""
    cache_dir: str = ""
    """Directory of reproducible data, shared by all nodes of this machine and user. Default: ``~/.cache/fray``."""
    lease_s: float = 600.0
    """Seconds of silence after which the controller places the node's attempts elsewhere."""
    job_uids: str = ""
    """Range of uids for jobs (`fray.node.accounts`), ``FIRST-LAST``; empty: they run under the account of the node."""
    secrets_dir: str = ""
    """Directory of `fray.node.secrets`; empty: this node has none."""
    pid_namespace: PidNamespaceMode = PidNamespaceMode.AUTO
    memory_limit: MemoryLimitMode = MemoryLimitMode.AUTO
    preload: tuple[str, ...] = ()
    """Modules that the processes of jobs have imported when they start, in the node's own environment."""
    logs: LogRules = Factory(LogRules)
    environments: EnvironmentLimits = Factory(EnvironmentLimits)
    boot_id: str = ""
    state_id: str = ""
    """See `NodeHello.state_id`."""
    process: ProcessMark | None = None
    detected_devices: tuple[str, ...] = ()
    """Devices of its capacity that were detected, and not only configured."""
    drain_s: float = 0.0
    """Seconds that running jobs have to finish when the node is asked to end."""

    @property
    def patience_s(self) -> float:
        """Seconds that a node without a controller keeps its attempts: certainly less than the controller waits."""
        return max(self.lease_s / 2, self.lease_s - NOTICE_MARGIN_S)
