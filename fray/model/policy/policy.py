"""What the operator decides: who gets how much of the cluster, and who goes first. One file (see docs/policy.md).

Nothing here is stored: like the limits of the law it is given at each start of the controller.
"""

from __future__ import annotations

from attrs import Factory

from fray.model.frozen import frozen
from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.priority import Band

HALF_LIFE_S = 86_400.0
"""A day: who had the cluster yesterday goes behind today, and nobody pays for last week."""
DEFAULT_TENANT = "*"
"""The table for those that have none of their own, and for the keys that theirs lacks."""
DEFAULT_BANDS = (Band.PRODUCTION, Band.INTERACTIVE, Band.BATCH)


@frozen(kw_only=True)
class Amounts:
    """So much of a cluster; what is not named has no limit.

    Attributes:
        devices: by kind (``gpu``, ``tpu``), or by kind and variant in lower case (``gpu:h100``).
    """

    cpu_milli: int | None = None
    memory_bytes: int | None = None
    devices: dict[str, int] = Factory(dict)


@frozen(kw_only=True)
class TenantPolicy:
    """What one user or namespace may have.

    Attributes:
        weight: of its share: a user of weight 2 gets twice what one of weight 1 gets.
        bands: that this user may ask for; of namespaces, none are asked.
        quota: what goes before all that is borrowed. None: everything is within.
        borrow: beyond the quota: True, as much as nobody else claims; False, nothing; an amount, so much.
    """

    weight: float = 1.0
    bands: tuple[Band, ...] = DEFAULT_BANDS
    quota: Amounts | None = None
    borrow: bool | Amounts = True

    @property
    def band(self) -> Band:
        """Of those who ask for none: interactive, or the nearest one they may have, later ones first."""
        usual = Band.INTERACTIVE.rank
        return min(self.bands, key=lambda band: (band.rank < usual, abs(band.rank - usual)))


@frozen(kw_only=True)
class Preemption:
    """Who may take the place of whom, and how often that may happen to one job.

    Attributes:
        enabled: False: nobody is ended for the sake of others.
        bands: whose jobs may take the places of later bands.
        reclaim: a tenant within its quota may take back what others have borrowed.
        shield_s: a job that has had its machines for less than this is left alone.
        limit: so often at most a job is ended for the sake of others within ``period_s``.
        period_s: see there.
        patience_s: who is to start within this time anyway, takes nobody's place.
        machine_wait_s: nor does one for whom a machine was asked for so short a time ago.
        notice_limit_s: longest notice that a job may ask for (`JobRequest.preemption_notice_s`).
    """

    enabled: bool = True
    bands: tuple[Band, ...] = (Band.SYSTEM, Band.PRODUCTION)
    reclaim: bool = True
    shield_s: float = 60.0
    limit: int = 2
    period_s: float = 3600.0
    patience_s: float = 30.0
    machine_wait_s: float = 120.0
    notice_limit_s: float = 600.0


@frozen(kw_only=True)
class Policy:
    """The whole file.

    Attributes:
        preemption: who may take the place of whom.
        half_life_s: of past use: so long after it, it counts half.
        users, namespaces: terms by name, complete; those of ``"*"`` are for all others.
        groups: machines that can be had.
        spend_limit_per_hour: what units of all groups together may cost, in whatever money their prices are. None: any.
    """

    half_life_s: float = HALF_LIFE_S
    users: dict[str, TenantPolicy] = Factory(dict)
    namespaces: dict[str, TenantPolicy] = Factory(dict)
    groups: tuple[GroupConfig, ...] = ()
    spend_limit_per_hour: float | None = None
    preemption: Preemption = Preemption()

    def user(self, name: str) -> TenantPolicy:
        return self.users.get(name) or self.users.get(DEFAULT_TENANT) or _DEFAULT

    def namespace(self, name: str) -> TenantPolicy:
        return self.namespaces.get(name) or self.namespaces.get(DEFAULT_TENANT) or _DEFAULT


_DEFAULT = TenantPolicy()
