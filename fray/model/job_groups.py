"""Job groups: jobs that are placed together, and how the end of one affects the others.

Roles, stages and the two kinds of members are those of Kubernetes' JobSet (``dependsOn``, ``successPolicy``), Volcano
(tasks of one job) and TorchX (``Role``).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

from attrs import Factory, field

from fray.errors import InvalidRequest
from fray.model.frozen import frozen
from fray.model.ids import JobId, Namespace, check_name

STAGE_LIMIT = 100
"""Highest stage number; each stage waits for all before it."""


class Success(StrEnum):
    """Condition for a group's success. Jobs that still run are then ended in order."""

    PRIMARY = "primary"
    """All primary members have succeeded."""
    ALL = "all"
    """All members have succeeded, auxiliary ones included."""
    ANY = "any"
    """One primary member has succeeded. Failures of primary members matter only once none is left."""


class Restart(StrEnum):
    """Members that are restarted together with a failed member that may be retried."""

    MEMBER = "member"
    """The failed member alone, in the same region or zone as the others."""
    GROUP = "group"
    """All that have not succeeded, together, once all have ended; the restart costs the others no retry."""


class AuxiliaryFailure(StrEnum):
    """Effect of a permanent failure of an auxiliary member on its group."""

    ESCALATE = "escalate"
    """The group fails."""
    ABSORB = "absorb"
    """The group continues without the member."""


W = TypeVar("W", bound=StrEnum)


def _success(value: str) -> Success:
    return _parse(Success, "success", value)


def _restart(value: str) -> Restart:
    return _parse(Restart, "restart", value)


def _failure(value: str) -> AuxiliaryFailure:
    return _parse(AuxiliaryFailure, "auxiliary_failure", value)


def _parse(choices: type[W], name: str, value: str) -> W:
    try:
        return choices(value)
    except ValueError:
        known = ", ".join(repr(each.value) for each in choices)
        raise InvalidRequest(f"JobGroupConfig({name}={value!r}) must be one of {known}") from None


@frozen
class JobRole:
    """Role of a job in its group.

    Attributes:
        name: name of the role; several jobs may share it. In the process: ``FRAY_ROLE``.
        stage: jobs of a later stage begin when all jobs of the earlier stages are running (or have ended in order).
            Their machines are allocated from the start. Default 0: begin at once.
        auxiliary: a helper of the others: the group may succeed without it, and it is ended then. Default False:
            primary.

    Raises:
        InvalidRequest: an invalid name or stage.
    """

    name: str
    stage: int = 0
    auxiliary: bool = False

    def __attrs_post_init__(self) -> None:
        check_name(self.name, "a role")
        stage = self.stage
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage <= STAGE_LIMIT:
            raise InvalidRequest(f"role {self.name!r}: stage={stage!r} must be a number from 0 to {STAGE_LIMIT}")


def as_role(role: JobRole | str | None) -> JobRole | None:
    """Return the role itself, or a `JobRole` of this name. Raises InvalidRequest: neither is given."""
    if role is None or isinstance(role, JobRole):
        return role
    if isinstance(role, str):
        return JobRole(role)
    raise InvalidRequest(f"role={role!r} must be a name or a JobRole, as JobRole('trainer', stage=1)")


@frozen
class JobGroupConfig:
    """Options of jobs that are placed together: all or none, in one decision, near each other.

    Attributes:
        name: name of the group; unique among the living groups of the namespace. Default: generated.
        namespace: namespace of all its jobs. Default: that of the launching job or driver.
        same_region: use machines of one region. Machines that name none count as one region. Default True.
        same_zone: use machines of one zone. Default False.
        success: condition for the group's success: ``"primary"`` (default): all primary members have succeeded;
            ``"all"``: all members; ``"any"``: one primary member.
        auxiliary_failure: effect of a permanent failure of an auxiliary member: ``"escalate"`` (default): the group
            fails; ``"absorb"``: the group continues without it.
        restart: members restarted with a failed member that may be retried: ``"member"`` (default): that member alone,
            where the others are; ``"group"``: all that have not succeeded, together.

    Raises:
        InvalidRequest: an invalid name or value, or two options that contradict each other.
    """

    name: str = ""
    namespace: Namespace | None = None
    same_region: bool = True
    same_zone: bool = False
    success: Success = field(default=Success.PRIMARY, converter=_success)
    auxiliary_failure: AuxiliaryFailure = field(default=AuxiliaryFailure.ESCALATE, converter=_failure)
    restart: Restart = field(default=Restart.MEMBER, converter=_restart)

    def __attrs_post_init__(self) -> None:
        if self.name:
            check_name(self.name, "a job group")
        if self.namespace is not None:
            check_name(self.namespace, "a namespace")
        if self.success is Success.ALL and self.auxiliary_failure is AuxiliaryFailure.ABSORB:
            raise InvalidRequest(
                f"job group {self.name!r}: success='all' needs every member, which contradicts "
                "auxiliary_failure='absorb': "
                "write success='primary'"
            )

    @property
    def same(self) -> str:
        """The attribute of machines that its members share; empty: none."""
        return "zone" if self.same_zone else "region" if self.same_region else ""


@frozen(kw_only=True)
class JobGroupSpec:
    """A group as sent together with its jobs (`Launch`)."""

    group_id: str
    config: JobGroupConfig


@frozen(kw_only=True)
class MemberInfo:
    """One job of a group."""

    job_id: JobId
    name: str
    role: str
    stage: int
    auxiliary: bool
    state: str
    """Value of `JobState`."""
    absorbed: bool = False
    """Failed, and the group continued without it."""


@frozen(kw_only=True)
class JobGroupInfo:
    """A group's state; times are seconds since the epoch.

    Attributes:
        group_id, name, namespace: identity of the group.
        state: value of `JobState`: pending until all members are placed, running until its end is decided and the last
            member has ended.
        error_message: first cause of a failure or stop.
        decided_by: job whose end decided the group's.
        place: region or zone where it runs (see ``same``); empty if it is not placed, or the machines name none.
        same: ``"region"``, ``"zone"`` or empty.
        reason: reason for waiting, while it waits.
        members: its recorded jobs, in the order of the request.
    """

    group_id: str
    name: str
    namespace: Namespace
    state: str
    error_message: str | None = None
    decided_by: JobId = ""
    place: str = ""
    same: str = ""
    launch_time: float | None = None
    start_time: float | None = None
    """Time when all members first had machines."""
    end_time: float | None = None
    reason: str = ""
    members: tuple[MemberInfo, ...] = Factory(tuple)
