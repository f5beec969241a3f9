"""Policy of the cluster: quotas, shares, preemption and machine groups, from one file (see docs/policy.md).

It is not stored: like the scheduler's limits it is passed at each start of the controller.
"""

from __future__ import annotations

from attrs import Factory

from fray.model.frozen import frozen
from fray.model.policy.machine_groups import GroupConfig
from fray.model.policy.priority import Band

HALF_LIFE_S = 86_400.0
"""Half-life of past usage: a day, so that yesterday's heavy users wait today, while last week hardly counts."""
DEFAULT_TENANT = "*"
"""Name of the table for tenants without one, and for keys that a tenant's table lacks."""
EVERYONE = "*"
"""All users of the cluster, where a list of users is expected."""
DEFAULT_BANDS = (Band.PRODUCTION, Band.INTERACTIVE, Band.BATCH)


@frozen(kw_only=True)
class Amounts:
    """Amounts of resources; a resource that is not named is unlimited."""

    cpu_milli: int | None = None
    memory_bytes: int | None = None
    devices: dict[str, int] = Factory(dict)


@frozen(kw_only=True)
class TenantPolicy:
    """Shares and limits of one user or namespace.

    Attributes:
        weight: weight of its share: a user of weight 2 gets twice as much as a user of weight 1.
        bands: priority bands this user may request; not used for namespaces.
        quota: amount that is not borrowed. None: everything is within the quota.
        borrow: amount allowed beyond the quota: True: any surplus; False: nothing; or an amount.
        launches_for: users of the cluster for whom this user's jobs and drivers may launch jobs; ``*``: all. Not used
            for namespaces.
    """

    weight: float = 1.0
    bands: tuple[Band, ...] = DEFAULT_BANDS
    quota: Amounts | None = None
    borrow: bool | Amounts = True
    launches_for: tuple[str, ...] = ()

    @property
    def band(self) -> Band:
        """Default band: interactive, or the nearest allowed one, later bands first."""
        usual = Band.INTERACTIVE.rank
        return min(self.bands, key=lambda band: (band.rank < usual, abs(band.rank - usual)))


@frozen(kw_only=True)
class Preemption:
    """Rules for preemption: bands, and limits that protect single jobs.

    Attributes:
        enabled: False: no job is preempted.
        bands: bands whose jobs may preempt those of later bands.
        reclaim: whether a tenant within its quota may reclaim what others have borrowed.
        shield_s: run time in seconds below which a job is not preempted.
        limit: maximum number of preemptions of one job within ``period_s``.
        period_s: period of ``limit``.
        patience_s: a job that is expected to start within this time preempts nothing.
        machine_wait_s: seconds after a request for machines in which the job that caused it preempts nothing.
        notice_limit_s: longest notice that a job may request (`JobRequest.preemption_notice_s`).
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
    """Contents of the policy file.

    Attributes:
        preemption: rules for preemption.
        half_life_s: seconds after which past usage counts half.
        users, namespaces: complete tenant policies by name; that of ``"*"`` is for all others.
        groups: machine groups for autoscaling.
        spend_limit_per_hour: maximum cost of the units of all groups, in the currency of their prices. None: no limit.
        prices: price of an hour of ``cpu`` (a CPU), ``memory`` (a GiB), ``gpu`` and ``tpu`` (a chip) or one of their
            variants (``gpu:h100``), for `fray.model.monitoring.accounting.cost`. What is left out has no price.
    """

    half_life_s: float = HALF_LIFE_S
    users: dict[str, TenantPolicy] = Factory(dict)
    namespaces: dict[str, TenantPolicy] = Factory(dict)
    groups: tuple[GroupConfig, ...] = ()
    spend_limit_per_hour: float | None = None
    preemption: Preemption = Preemption()
    prices: dict[str, float] = Factory(dict)

    def user(self, name: str) -> TenantPolicy:
        return self.users.get(name) or self.users.get(DEFAULT_TENANT) or _DEFAULT

    def namespace(self, name: str) -> TenantPolicy:
        return self.namespaces.get(name) or self.namespaces.get(DEFAULT_TENANT) or _DEFAULT


_DEFAULT = TenantPolicy()
